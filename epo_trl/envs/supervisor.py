"""Child processes that never outlive this process, and seats: rights to an environment in a shared process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any


class Seats:
    """Numbered seats. `len()` is the number of seats in use."""

    def __init__(self) -> None:
        self._seats: set[int] = set()
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._seats)

    def take_seat(self) -> int:
        """Reserves a seat and returns its number."""
        seat = next(self._numbers)
        self._seats.add(seat)
        return seat

    def forget_seat(self, seat: int) -> None:
        """Frees a seat."""
        self._seats.discard(seat)


class ChildProcess:
    """A running child process. It is killed when this object is garbage-collected, at the latest when Python exits.

    The child leads its own session: Ctrl-C does not reach it, and its own children are killed with it. If Python is
    killed, the child has to exit at the end of a pipe that only Python holds; a forked child closes it at once.

    Args:
        what: Description for messages, for example `"the ScienceWorld JVM"`.
        let_go: Closes, in a forked child of Python, what keeps the process alive besides `stdin` and `stdout`.
        clean_up: Called once, after the process has ended.
        popen: Other arguments of `subprocess.Popen`.
    """

    def __init__(
        self, what: str, command: list[str], let_go: Callable[[], None], clean_up: Callable[[], None], **popen: Any
    ) -> None:
        self._process: subprocess.Popen[bytes] = subprocess.Popen(command, start_new_session=True, **popen)
        self.pid = self._process.pid
        self.stdout: Any = self._process.stdout  # a pipe, if `popen` says so
        self.name = f"{what} (process {self.pid})"
        self.end = ""  # reason why there will be no more answers
        self.hung = False  # whether the process was killed because it did not answer in time
        _ours[self._process] = let_go
        self._stop = weakref.finalize(self, _stop, self._process, clean_up)

    @property
    def is_alive(self) -> bool:
        """Whether the process still answers, as far as is known."""
        return not self.end and self.exit_status() is None

    def exit_status(self, seconds: float = 0.0) -> int | None:
        """Returns the exit status (negative for a signal), or `None` if the process still runs after this time."""
        if self._process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                _kill_group(self._process)  # processes it has left behind
        return self._process.returncode

    def close(self, why: str = "") -> None:
        """Kills the process, which has nothing to save. May be called twice; `end` keeps the first reason."""
        self.end = self.end or why or f"{self.name} was closed"
        self._stop()

    def close_hung(self, seconds: float) -> None:
        """Kills the process because it did not answer within the time limit."""
        self.hung = True
        self.close(f"{self.name} hung: no answer within {seconds:g} s; it was killed, and a reset starts another")

    def close_dead(self, last_words: str = "") -> None:
        """Closes a process that was found dead; `last_words` is its last output."""
        self._stop()
        died = f"{self.name} died with exit status {self._process.returncode}; a reset starts another"
        self.close(f"{died}. {last_words}" if last_words else died)


_ours: dict[subprocess.Popen[bytes], Callable[[], None]] = {}  # children of this process -> `let_go`


def _stop(process: subprocess.Popen[bytes], clean_up: Callable[[], None]) -> None:
    if process not in _ours:  # a forked child must not kill its parent's children
        return
    if process.returncode is None:
        _kill_group(process)
        process.wait()
    _close_pipes(process)
    clean_up()
    del _ours[process]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its children. Call it before the exit is reaped or right after: process ids are reused."""
    if process in _ours:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all are gone; macOS raises the second
            os.killpg(process.pid, signal.SIGKILL)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _let_go() -> None:
    """Closes, in a forked child, what keeps its parent's children alive."""
    for process, let_go in _ours.items():
        _close_pipes(process)
        let_go()
    _ours.clear()


os.register_at_fork(after_in_child=_let_go)
