"""A worker process, and the thread of this process that asks it: one request at a time, in order."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from epo_trl.bounds import Count, Positive, check_bounds
from epo_trl.envs.base import EnvError, Faults
from epo_trl.envs.supervisor import ChildProcess, Seats

RESET_RETRIES = 2  # each in a new process
START_SECONDS = 120.0  # added for the first request of a process, which imports the suite
_LIBRARY = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Distribution of environments over processes. One that exceeds a time limit is killed."""

    workers: Count = 1
    step_seconds: Positive = 60.0
    reset_seconds: Positive = 120.0

    def __post_init__(self) -> None:
        check_bounds(self)


class WorkerLost(EnvError):
    """The process that held the environment died, or hung and was killed."""


class WorkerProcess:
    """One running worker process, which gets the pickled suite. Only the thread of its worker asks it."""

    def __init__(self, suite: bytes, faults: Faults) -> None:
        self._pipe, theirs = Pipe()
        self.child = ChildProcess(
            "the environment worker",
            [sys.executable, "-P", "-m", "epo_trl.envs.pool.program", str(theirs.fileno())],
            self._pipe.close,
            lambda: None,  # the thread may be waiting at the pipe, and closes it by dropping this object
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the games' output
            env={**os.environ, "PYTHONPATH": str(_LIBRARY)},  # until the process has read the run's own
        )
        theirs.close()
        self._faults, self._seconds_to_start = faults, START_SECONDS
        self._pipe.send((sys.path, os.environ.get("PYTHONPATH"), suite))

    def ask(self, seat: int, what: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        """Sends a request and returns its answer.

        Raises:
            EnvError: If the environment raised it.
            WorkerLost: If the process died, or hung and was killed.
        """
        if self.child.end:
            raise WorkerLost(self.child.end)
        seconds, self._seconds_to_start = seconds + self._seconds_to_start, 0.0
        try:
            self._pipe.send((seat, what, arguments))
            if not self._pipe.poll(seconds):
                self._faults.timeouts += 1
                self.child.close_hung(seconds)
                raise WorkerLost(self.child.end)
            answer = self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            self.child.close_dead()
            raise WorkerLost(self.child.end) from error
        is_good, result = pickle.loads(answer)
        if not is_good:
            raise EnvError(result)
        return result


class Worker(Seats):
    """A process with environments. It starts with its first request and restarts after a loss."""

    def __init__(self, suite: bytes, settings: PoolSettings) -> None:
        super().__init__()
        self.faults = Faults()
        self._suite, self._settings = suite, settings
        self._process: WorkerProcess | None = None
        self._last: Future[Any] | None = None
        self._requests: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=_work, args=(self._requests,), name="environment worker", daemon=True).start()
        weakref.finalize(self, self._requests.put, None)

    @property
    def is_idle(self) -> bool:
        """Whether all requests have been answered."""
        return self._last is None or self._last.done()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Calls a method of this worker in its thread, after the calls before it."""
        self._last = Future()
        self._requests.put((self._last, function, arguments))
        return self._last

    def reset(self, seat: int, seed: int | None, options: dict[str, Any] | None) -> tuple[WorkerProcess, Any]:
        """Resets an environment; again in another process if one is lost. Returns the process and its answer."""
        for _ in range(RESET_RETRIES):
            try:
                return self._reset(seat, seed, options)
            except WorkerLost:
                self.faults.retries += 1
        return self._reset(seat, seed, options)

    def _reset(self, seat: int, *start: Any) -> tuple[WorkerProcess, Any]:
        process = self._living_process(seat)
        return process, process.ask(seat, "reset", start, self._settings.reset_seconds)

    def step(self, process: WorkerProcess, seat: int, action: str) -> Any:
        """Steps an environment in the process of its episode."""
        return process.ask(seat, "step", (action,), self._settings.step_seconds)

    def reseed(self, seat: int, seed: int) -> None:
        """Seeds the random numbers of an environment."""
        self._living_process(seat).ask(seat, "reseed", (seed,), self._settings.step_seconds)

    def close_env(self, seat: int) -> None:
        """Closes an environment, if its process still lives."""
        process = self._process
        if process is not None and process.child.is_alive:
            process.ask(seat, "close", (), self._settings.step_seconds)

    def forget_seat(self, seat: int) -> None:
        """Frees a seat. The process stops with the last one."""
        super().forget_seat(seat)
        if not self._seats and self._process is not None:
            self._process.child.close()
            self._process = None

    def _living_process(self, seat: int) -> WorkerProcess:
        if seat not in self._seats:  # closed meanwhile; nobody would stop the process
            raise EnvError("the environment is closed")
        if self._process is not None and not self._process.child.is_alive:
            self.faults.restarts += 1
            self._process = None
        self._process = self._process or WorkerProcess(self._suite, self.faults)
        return self._process


def _work(requests: SimpleQueue[Any]) -> None:
    while (request := requests.get()) is not None:
        future, function, arguments = request
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)
        del request, future, function, arguments  # which keep the worker and its process alive
