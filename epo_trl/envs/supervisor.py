"""Child processes that never outlive us, and the words for one that answers no more."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import weakref
from collections.abc import Callable
from typing import IO, Any


class ChildProcess:
    """A running child process. It is killed when nobody refers to this object any more, at the latest at our exit.

    It leads a session of its own: Ctrl-C reaches Python alone, and what it starts is killed with it. If we are killed,
    it has to exit by itself, at the end of a pipe that only we hold; a forked child of ours closes that at once.

    Args:
        what: For messages, for example `"the ScienceWorld JVM"`.
        command: The program and its arguments.
        let_go: Closes in a forked child of ours, beside `stdin` and `stdout`, what keeps the process alive.
        clean_up: Called once, after its end.
        popen: Other arguments of `subprocess.Popen`.

    Attributes:
        name: `what`, and the number of the process.
        end: Why there will be no more answers; `""` until it is closed.
        hung: Whether it was killed because it did not answer in time.

    Raises:
        OSError: If the program cannot be started.
    """

    def __init__(
        self, what: str, command: list[str], let_go: Callable[[], None], clean_up: Callable[[], None], **popen: Any
    ) -> None:
        self._process: subprocess.Popen[bytes] = subprocess.Popen(command, start_new_session=True, **popen)
        self.name = f"{what} (process {self.pid})"
        self.end = ""
        self.hung = False
        _ours[self._process] = let_go
        self._stop = weakref.finalize(self, _stop, self._process, clean_up)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def stdout(self) -> IO[bytes]:
        """What it prints, if `stdout` is a pipe."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def is_alive(self) -> bool:
        """Whether it still answers, as far as we know."""
        return not self.end and self.exit_status() is None

    def exit_status(self, seconds: float = 0.0) -> int | None:
        """Returns the exit status, for a signal its negative number; `None` if it runs on for so many seconds."""
        if self._process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                _kill_group(self._process)  # what it has left behind
        return self._process.returncode

    def close(self, why: str = "") -> None:
        """Kills it: there is nothing to save. May be called twice; `end` is the first reason."""
        self.end = self.end or why or f"{self.name} was closed"
        self._stop()

    def close_hung(self, seconds: float) -> None:
        """Kills it because it did not answer within so many seconds."""
        self.hung = True
        self.close(f"{self.name} hangs: no answer within {seconds:g} s; it was killed, and a reset starts another")

    def close_dead(self, last_words: str = "") -> None:
        """Closes what was found dead, with the last that it said."""
        self._stop()
        died = f"{self.name} died with exit status {self._process.returncode}; a reset starts another"
        self.close(f"{died}. {last_words}" if last_words else died)


_ours: dict[subprocess.Popen[bytes], Callable[[], None]] = {}  # the children of this process: `let_go`


def _stop(process: subprocess.Popen[bytes], clean_up: Callable[[], None]) -> None:
    if process not in _ours:  # a forked child must not kill its parent's
        return
    if process.returncode is None:
        _kill_group(process)
        process.wait()
    _close_pipes(process)
    clean_up()
    del _ours[process]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and what it started. To be called before its end is known or right after: numbers come again."""
    if process in _ours:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all are gone; macOS says the other
            os.killpg(process.pid, signal.SIGKILL)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _let_go() -> None:
    """Closes in a forked child what keeps its parent's children alive."""
    for process, let_go in _ours.items():
        _close_pipes(process)
        let_go()
    _ours.clear()


os.register_at_fork(after_in_child=_let_go)
