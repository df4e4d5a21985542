"""Environments in processes of their own: a game that hangs or kills its process costs its episodes, not the run."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from epo_trl.envs.base import EnvError, Expert, Faults, Info, TaskSuite, TextEnv
from epo_trl.envs.seats import Seats

START_SECONDS = 120.0  # more for the first request of a process: it imports the suite


class WorkerLost(EnvError):
    """The process that held the environment died, or hung and was killed."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How environments are spread over processes.

    Args:
        workers: Number of processes.
        step_seconds: Longest time that a step may take; a process that takes longer is killed.
        reset_seconds: Longest time that a reset may take.
        reset_retries: How often a reset is tried again, in a new process, if its process died or was killed.
    """

    workers: int = 1
    step_seconds: float = 60.0
    reset_seconds: float = 120.0
    reset_retries: int = 2

    def __post_init__(self) -> None:
        for name, least in {"workers": 1, "reset_retries": 0}.items():
            if getattr(self, name) < least:
                raise EnvError(f"{name}: got {getattr(self, name)}, takes an integer >= {least}")
        for name in ("step_seconds", "reset_seconds"):
            if not getattr(self, name) > 0:
                raise EnvError(f"{name}: got {getattr(self, name)}, takes a number > 0")


class PooledSuite(TaskSuite):
    """A task suite whose environments live in worker processes, several in each.

    The tasks, their starts and their games are those of the suite. A worker that dies or exceeds a limit is killed; the
    episodes on it raise `WorkerLost`, and the next reset of any of its environments starts another process.

    Args:
        suite: The suite. It is pickled and sent to the workers, so its class must be importable there.
        settings: Of the pool.
    """

    def __init__(self, suite: TaskSuite, settings: PoolSettings | None = None) -> None:
        self.suite, self.pool = suite, settings or PoolSettings()
        self.name, self.splits, self.settings, self.made_by = suite.name, suite.splits, suite.settings, suite.made_by
        self._workers = self._make_workers()

    def task_ids(self, split: str) -> Sequence[str]:
        """As the suite's."""
        return self.suite.task_ids(split)

    def make_env(self) -> PooledEnv:
        """Returns a fresh environment in the worker that has the fewest."""
        return PooledEnv(min(self._workers, key=len), self.pool)

    def make_expert(self, seed: int = 0) -> Expert:
        """As the suite's."""
        return self.suite.make_expert(seed)

    def demonstration_tasks(self, split: str, max_turns: int, count: int | None = None) -> Sequence[str]:
        """As the suite's."""
        return self.suite.demonstration_tasks(split, max_turns, count)

    def faults(self) -> Faults:
        """Returns what has gone wrong with the workers so far."""
        return sum((worker.faults for worker in self._workers), self.suite.faults())

    def _make_workers(self) -> list[Worker]:
        try:
            sent = pickle.dumps(self.suite)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise EnvError(f"suite: {self.suite.name!r} cannot be sent to a worker process: {error}") from error
        return [Worker(sent) for _ in range(self.pool.workers)]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_workers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._workers = self._make_workers()


class Worker(Seats):
    """A process with environments, started when it is first asked and again after it was lost. Not for threads.

    Args:
        suite: The pickled suite.

    Attributes:
        faults: What has gone wrong so far.
    """

    def __init__(self, suite: bytes) -> None:
        super().__init__()
        self.faults = Faults()
        self._suite = suite
        self._process: _Process | None = None

    def forget_seat(self, seat: int) -> None:
        """Frees a seat. The process stops with the last one."""
        super().forget_seat(seat)
        if not self._seats and self._process is not None:
            self._process.kill()
            self._process = None

    def process(self) -> _Process:
        """Returns the process, a new one if there is none or it was lost."""
        if self._process is not None and not self._process.is_alive:
            self.faults.restarts += 1
            self._process = None
        if self._process is None:
            self._process = _Process(self._suite, self.faults)
        return self._process


class _Process:
    """One running worker process. It answers in the order in which it is asked.

    Args:
        suite: The pickled suite.
        faults: Where time-outs are counted.
    """

    def __init__(self, suite: bytes, faults: Faults) -> None:
        self._ours, theirs = Pipe()
        # In a session of its own, so that Ctrl-C reaches the trainer alone. What games print is thrown away.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "epo_trl.envs.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            start_new_session=True,
        )
        theirs.close()
        self._stop = weakref.finalize(self, _stop, self._process, self._ours, os.getpid())
        self.pid = self._process.pid
        self._faults = faults
        self._end = ""  # why there will be no more answers
        self._numbers = count()
        self._limits: dict[int, float] = {}  # seconds of each request that is not answered yet, the oldest first
        self._since = 0.0  # when the oldest of them began, as far as we know
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._unwanted: set[int] = set()
        self._send((sys.path, suite))

    @property
    def is_alive(self) -> bool:
        """Whether it still answers, as far as we know."""
        return not self._end and self._process.poll() is None

    def ask(self, seat: int, what: str, arguments: tuple[Any, ...], seconds: float) -> int:
        """Returns the number of the request, whose answer `wait` returns."""
        number = next(self._numbers)
        if not self._limits:
            self._since = time.monotonic()
        self._limits[number] = seconds if number else seconds + START_SECONDS
        self._send((seat, what, arguments))
        return number

    def wait(self, number: int) -> Any:
        """Returns the answer. The time of a request counts from when those before it were answered.

        Raises:
            EnvError: If the environment raised.
            WorkerLost: If the process has died, or hangs; it is killed then.
        """
        while number not in self._answers:
            self._read_one()
        is_good, result = self._answers.pop(number)
        if not is_good:
            raise EnvError(result)
        return result

    def forget(self, number: int) -> None:
        """Takes note that nobody will wait for this request."""
        if self._answers.pop(number, None) is None and number in self._limits:
            self._unwanted.add(number)

    def kill(self) -> None:
        """Ends the process: there is nothing to save."""
        self._end = self._end or "the worker process was closed"
        self._stop()

    def _send(self, message: Any) -> None:
        if self._end:
            return
        try:
            self._ours.send(message)
        except OSError:
            self._note_death()

    def _read_one(self) -> None:
        """Reads the answer to the oldest request."""
        if self._end:
            raise WorkerLost(self._end)
        number, seconds = next(iter(self._limits.items()))
        try:
            if not self._ours.poll(max(0.0, self._since + seconds - time.monotonic())):
                self._faults.timeouts += 1
                self._end = (
                    f"{self._name} hangs: no answer within {seconds:g} s; it was killed, and a reset starts another"
                )
                self._stop()
                raise WorkerLost(self._end)
            answer = self._ours.recv_bytes()
        except (EOFError, OSError) as error:
            self._note_death()
            raise WorkerLost(self._end) from error
        self._since = time.monotonic()
        del self._limits[number]
        if number in self._unwanted:
            self._unwanted.discard(number)
        else:
            self._answers[number] = _unpickled(answer)

    @property
    def _name(self) -> str:
        return f"the environment worker (process {self.pid})"

    def _note_death(self) -> None:
        self._stop()
        self._end = f"{self._name} died with exit status {self._process.returncode}; a reset starts another"


def _unpickled(answer: bytes) -> tuple[bool, Any]:
    try:
        is_good, result = pickle.loads(answer)
    except Exception as error:  # for example a class in `info` that cannot be imported here
        return False, f"the environment's answer cannot be read: {type(error).__name__}: {error}"
    return is_good, result


def _stop(process: subprocess.Popen[bytes], connection: Connection, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not kill its parent's worker
        connection.close()
        process.kill()
        process.wait()


class PooledEnv(TextEnv):
    """An environment in a worker.

    Args:
        worker: Where it lives.
        settings: The limits.
    """

    def __init__(self, worker: Worker, settings: PoolSettings) -> None:
        self._worker, self._settings = worker, settings
        self._seat = worker.take_seat()
        self._free = weakref.finalize(self, worker.forget_seat, self._seat)
        self._process: _Process | None = None  # the one that has the running episode
        self._number: int | None = None  # of the request that nobody waited for yet
        self._start: tuple[int | None, dict[str, Any] | None] = (None, None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Returns the first observation and info.

        Raises:
            EnvError: What the environment raised.
            WorkerLost: If the process died or hung, in the last retry too.
        """
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Starts a reset, for `reset_wait` to return."""
        if not self._free.alive:
            raise EnvError("reset: the environment is closed; make another")
        self._start = (seed, options)
        self._ask_reset()

    def reset_wait(self) -> tuple[str, Info]:
        """Returns the result of `reset_async`. If the process is lost, the reset is tried again in another."""
        for _ in range(self._settings.reset_retries):
            try:
                return self._wait()
            except WorkerLost:
                self._worker.faults.retries += 1
                self._ask_reset()
        return self._wait()

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Returns `(observation, reward, terminated, truncated, info)`.

        Raises:
            EnvError: What the environment raised.
            WorkerLost: If the process died or hung.
        """
        self.step_async(action)
        return self.step_wait()

    def step_async(self, action: str) -> None:
        """Starts a step, for `step_wait` to return."""
        if self._process is None:
            raise EnvError("step: there is no episode; call reset(options={'task_id': ...}) first")
        self._forget()
        self._number = self._process.ask(self._seat, "step", (action,), self._settings.step_seconds)

    def step_wait(self) -> tuple[str, float, bool, bool, Info]:
        """Returns the result of `step_async`."""
        return self._wait()

    def close(self) -> None:
        """Frees the environment; with the last one of a worker, the process stops. May be called twice."""
        if self._free.detach():
            self._forget()
            if self._process is not None:
                self._process.forget(self._process.ask(self._seat, "close", (), self._settings.step_seconds))
            self._process = None
            self._worker.forget_seat(self._seat)

    def _ask_reset(self) -> None:
        self._forget()
        self._process = self._worker.process()
        self._number = self._process.ask(self._seat, "reset", self._start, self._settings.reset_seconds)

    def _forget(self) -> None:
        number, self._number = self._number, None
        if number is not None and self._process is not None:
            self._process.forget(number)

    def _wait(self) -> Any:
        number, self._number = self._number, None
        if number is None or self._process is None:
            raise EnvError("nothing to wait for; call reset_async or step_async first")
        return self._process.wait(number)
