"""Environments in worker processes: a game that hangs or crashes costs its own episodes, not the run.

Each worker has a thread in this process that asks it: one request at a time, in order.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from epo_trl.envs.base import NOT_RUNNING, AsyncTextEnv, EnvError, Faults, Info, TaskSuite
from epo_trl.envs.supervisor import ChildProcess, Seats

RESET_RETRIES = 2  # each in a new process
START_SECONDS = 120.0  # added for the first request of a process, which imports the suite
_LIBRARY = Path(__file__).parents[2]


class WorkerLost(EnvError):
    """The process that held the environment died, or hung and was killed."""


class WorkerProcess:
    """One running worker process, which gets the pickled suite. Only the thread of its worker asks it."""

    def __init__(self, suite: bytes, faults: Faults) -> None:
        self._pipe, theirs = Pipe()
        self.child = ChildProcess(
            "the environment worker",
            [sys.executable, "-P", "-m", "epo_trl.envs.pool_program", str(theirs.fileno())],
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
        """Sends a request and returns its answer, or raises the environment's error or `WorkerLost`."""
        seconds, self._seconds_to_start = seconds + self._seconds_to_start, 0.0
        answer = b""
        try:
            if not self.child.end:
                self._pipe.send((seat, what, arguments))
                if self._pipe.poll(seconds):
                    answer = self._pipe.recv_bytes()
                else:
                    self._faults.timeouts += 1
                    self.child.close_hung(seconds)
        except (EOFError, OSError):
            self.child.close_dead()
        if not answer:
            raise WorkerLost(self.child.end)
        is_good, result = pickle.loads(answer)
        if not is_good:
            raise EnvError(result)
        return result


class Worker(Seats):
    """A process with environments. It starts with its first request and restarts after a loss."""

    def __init__(self, suite: bytes, step_seconds: float, reset_seconds: float) -> None:
        super().__init__()
        self.faults = Faults()
        self._suite, self.step_seconds, self._reset_seconds = suite, step_seconds, reset_seconds
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
        return process, process.ask(seat, "reset", start, self._reset_seconds)

    def reseed(self, seat: int, seed: int) -> None:
        """Seeds the random numbers of an environment."""
        self._living_process(seat).ask(seat, "reseed", (seed,), self.step_seconds)

    def close_env(self, seat: int) -> None:
        """Closes an environment, if its process still lives."""
        process = self._process
        if process is not None and process.child.is_alive:
            process.ask(seat, "close", (), self.step_seconds)

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


class PooledEnv(AsyncTextEnv):
    """An environment in a worker process. Its calls raise `WorkerLost` if the process died or hung."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._seat = worker, worker.take_seat()
        self._free = weakref.finalize(self, worker.forget_seat, self._seat)
        self._process: WorkerProcess | None = None  # the process with the running episode

    def reset_async(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Starts a reset; `reset_wait` returns its result. If the process is lost, the reset is retried in another."""
        self._process, self._pending = None, self._worker.submit(self._worker.reset, self._seat, seed, options)

    def reset_wait(self) -> tuple[str, Info]:
        """Returns the result of `reset_async`."""
        self._process, answer = self._requested()
        return answer

    def step_async(self, action: str) -> None:
        """Starts a step; `step_wait` returns its result."""
        if self._process is None:
            raise EnvError(NOT_RUNNING)
        seconds = self._worker.step_seconds
        self._pending = self._worker.submit(self._process.ask, self._seat, "step", (action,), seconds)

    def reseed(self, seed: int) -> None:
        """Seeds the random numbers of the environment in its process."""
        self._worker.submit(self._worker.reseed, self._seat, seed).result()

    def close(self) -> None:
        """Closes the environment and, with a worker's last one, stops the process. May be called twice.

        Waits for the environment's own `close()`, and raises its error, unless the process is at work: it may hang.
        """
        if not self._free.detach():
            return
        self._process = self._pending = None
        try:
            is_idle, closing = self._worker.is_idle, self._worker.submit(self._worker.close_env, self._seat)
            if is_idle:
                with contextlib.suppress(WorkerLost):
                    closing.result()
        finally:
            self._worker.forget_seat(self._seat)


class PooledSuite:
    """A task suite whose environments run in worker processes, several in each. All else is that of the given suite.

    A worker that dies or exceeds a time limit is killed. Its episodes raise `WorkerLost`, and the next reset of any of
    its environments starts another process.

    The suite is pickled and sent to the workers, so its class must be importable there.
    """

    def __init__(
        self, suite: TaskSuite, workers: int = 1, step_seconds: float = 60.0, reset_seconds: float = 120.0
    ) -> None:
        self.suite, self._given = suite, (workers, step_seconds, reset_seconds)
        self.settings = suite.settings  # of the games in the workers, which have a copy of the suite
        sent = pickle.dumps(suite)
        self._workers = [Worker(sent, step_seconds, reset_seconds) for _ in range(workers)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.suite, name)

    def make_env(self) -> PooledEnv:
        """Creates an environment in the worker that has the fewest."""
        return PooledEnv(min(self._workers, key=len))

    def faults(self) -> Faults:
        """Returns the failure counts of the workers so far."""
        return sum((worker.faults for worker in self._workers), self.suite.faults())

    def __reduce__(self) -> tuple[Any, ...]:
        return PooledSuite, (self.suite, *self._given)
