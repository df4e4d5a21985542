"""The pool's end of a worker process: requests, time limits, and restarts of lost processes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import count
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from epo_trl.bounds import Count, CountOrZero, Positive, check_bounds
from epo_trl.envs.base import EnvError, Faults
from epo_trl.envs.border import ends_episode_alone, error_text
from epo_trl.envs.seats import Seats
from epo_trl.envs.supervisor import ChildProcess

START_SECONDS = 120.0  # added for the first request of a process, which imports the suite
_LIBRARY = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Distribution of environments over processes.

    Args:
        workers: Number of processes.
        step_seconds: Time limit of a step; a process that exceeds it is killed.
        reset_seconds: Time limit of a reset.
        reset_retries: Number of retries of a reset, each in a new process, after its process died or was killed.
    """

    workers: Count = 1
    step_seconds: Positive = 60.0
    reset_seconds: Positive = 120.0
    reset_retries: CountOrZero = 2

    def __post_init__(self) -> None:
        check_bounds(self)


class WorkerLost(EnvError):
    """The process that held the environment died, or hung and was killed."""


class Worker(Seats):
    """A process with environments. It starts with its first request and restarts after a loss. Not thread-safe.

    Args:
        suite: The pickled suite.

    Attributes:
        faults: Failure counts so far.
    """

    def __init__(self, suite: bytes) -> None:
        super().__init__()
        self.faults = Faults()
        self._suite = suite
        self._process: WorkerProcess | None = None

    def forget_seat(self, seat: int) -> None:
        """Frees a seat. The process stops with the last one."""
        super().forget_seat(seat)
        if not self._seats and self._process is not None:
            self._process.child.close()
            self._process = None

    def process(self) -> WorkerProcess:
        """Returns the process; starts one if there is none or it was lost."""
        if self._process is not None and not self._process.child.is_alive:
            self.faults.restarts += 1
            self._process = None
        if self._process is None:
            self._process = WorkerProcess(self._suite, self.faults)
        return self._process


class WorkerProcess:
    """One running worker process. It answers requests in the order of their arrival.

    Args:
        suite: The pickled suite.
        faults: Counter of time-outs.

    Attributes:
        child: The process.
    """

    def __init__(self, suite: bytes, faults: Faults) -> None:
        self._ours, theirs = Pipe()
        self.child = ChildProcess(
            "the environment worker",
            [sys.executable, "-P", "-m", "epo_trl.envs.pool.program", str(theirs.fileno())],
            self._ours.close,
            self._ours.close,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the games' output
            env={**os.environ, "PYTHONPATH": str(_LIBRARY)},  # until the process has read the run's own
        )
        theirs.close()
        self._faults = faults
        self._numbers = count()
        self._limits: dict[int, float] = {}  # seconds of each pending request, the oldest first
        self._since = 0.0  # start of the oldest pending request, as far as known
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._unwanted: set[int] = set()
        self._send((sys.path, os.environ.get("PYTHONPATH"), suite))

    @property
    def is_idle(self) -> bool:
        """Whether all requests have been answered, as far as is known."""
        return not self._limits

    def ask(self, seat: int, what: str, arguments: tuple[Any, ...], seconds: float) -> int:
        """Sends a request and returns its number; `wait` returns its answer."""
        number = next(self._numbers)
        if not self._limits:
            self._since = time.monotonic()
        self._limits[number] = seconds if number else seconds + START_SECONDS
        self._send((seat, what, arguments))
        return number

    def wait(self, number: int) -> Any:
        """Returns the answer. The time of a request is counted from the answer to the one before it.

        Raises:
            EnvError: If the environment raised it.
            WorkerLost: If the process died, or hung and was killed.
        """
        while number not in self._answers:
            self._read_one()
        is_good, result = self._answers.pop(number)
        if not is_good:
            raise EnvError(result)
        return result

    def has_answer(self, number: int) -> bool:
        """Whether `wait` returns or raises at once."""
        while number not in self._answers and not self.child.end:
            seconds = next(iter(self._limits.values()))
            if not self._ours.poll() and time.monotonic() < self._since + seconds:
                return False
            try:
                self._read_one()
            except WorkerLost:  # `wait` raises it to whoever waits for this number
                break
        return True

    def forget(self, number: int) -> None:
        """Records that nobody will wait for this request."""
        if self._answers.pop(number, None) is None and number in self._limits:
            self._unwanted.add(number)

    def _send(self, message: Any) -> None:
        if self.child.end:
            return
        try:
            self._ours.send(message)
        except OSError:
            self.child.close_dead()

    def _read_one(self) -> None:
        """Reads the answer to the oldest request."""
        if self.child.end:
            raise WorkerLost(self.child.end)
        number, seconds = next(iter(self._limits.items()))
        try:
            if not self._ours.poll(max(0.0, self._since + seconds - time.monotonic())):
                self._faults.timeouts += 1
                self.child.close_hung(seconds)
                raise WorkerLost(self.child.end)
            answer = self._ours.recv_bytes()
        except (EOFError, OSError) as error:
            self.child.close_dead()
            raise WorkerLost(self.child.end) from error
        self._since = time.monotonic()
        del self._limits[number]
        if number in self._unwanted:
            self._unwanted.discard(number)
        else:
            self._answers[number] = _unpickled(answer)


def _unpickled(answer: bytes) -> tuple[bool, Any]:
    try:
        is_good, result = pickle.loads(answer)
    except BaseException as error:  # for example a class in `info` that cannot be imported here
        if not ends_episode_alone(error):
            raise
        return False, f"the environment's answer cannot be read: {error_text(error)}"
    return is_good, result
