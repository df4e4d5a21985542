"""The temporary folder in which a JVM runs, and the removal of those that killed runs have left.

The engine writes a file where it runs. A folder is locked as long as our process or the JVM lives: the lock ends with
them, however they end, while a process id could be another's by then, or another container's. So whoever gets the lock
of a folder may remove it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "scienceworld-"
_LOCK = "lock"


class RunFolder:
    """A fresh folder in the temporary directory. Making one removes those that nobody uses any more.

    Attributes:
        path: Where it is.
        lock: File descriptor of the lock, to be inherited by the JVM.
    """

    def __init__(self) -> None:
        remove_abandoned()
        hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))  # shown when it is locked
        self.lock = os.open(hidden / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = hidden.rename(hidden.with_name(hidden.name[1:]))

    def let_go(self) -> None:
        """Gives up this process's share of the lock."""
        os.close(self.lock)

    def remove(self) -> None:
        """Removes the folder, and gives up the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.let_go()


def remove_abandoned() -> None:
    """Removes the folders of which neither the process nor the JVM lives."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            lock = os.open(path / _LOCK, os.O_RDWR)
        except OSError:  # none of ours, or of another user
            continue
        with contextlib.suppress(BlockingIOError):  # it is in use
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
