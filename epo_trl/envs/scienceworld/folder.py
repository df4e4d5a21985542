"""The temporary folder in which a JVM runs, and the removal of folders left by killed runs.

The engine writes a file to its working directory. A folder is locked as long as this process or the JVM lives. The lock
is released however they end; a process id, in contrast, could belong to another process or container by then. So
whoever can lock a folder may remove it.
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
    """A fresh folder in the temporary directory. Creating one removes those that are no longer in use.

    Attributes:
        path: Path of the folder.
        lock: File descriptor of the lock, to be inherited by the JVM.
    """

    def __init__(self) -> None:
        remove_abandoned()
        hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))  # renamed once it is locked
        self.lock = os.open(hidden / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = hidden.rename(hidden.with_name(hidden.name[1:]))

    def let_go(self) -> None:
        """Releases this process's share of the lock."""
        os.close(self.lock)

    def remove(self) -> None:
        """Removes the folder and releases the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.let_go()


def remove_abandoned() -> None:
    """Removes the folders whose process and JVM have both ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            lock = os.open(path / _LOCK, os.O_RDWR)
        except OSError:  # not such a folder, or another user's
            continue
        with contextlib.suppress(BlockingIOError):  # it is in use
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
