"""One program at a time in a folder: a lock that says which process holds it. Loads no torch."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

LOCK = "_running.json"  # in the folder; the Hub client uploads nothing that begins with "_"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)  # what file systems without locks answer


class RunningError(RuntimeError):
    """Another process uses the folder."""


@dataclass
class _Held:
    file: TextIO
    times: int = 1


# The locks that this process holds. A forked child has other keys, and so holds none of them.
_held: dict[tuple[int, Path], _Held] = {}


@contextmanager
def folder_lock(folder: Path, field: str) -> Iterator[None]:
    """Keeps other programs out of the folder for the time of the block.

    Args:
        folder: Is made if it is missing.
        field: The setting that named it, for messages.

    Raises:
        RunningError: If another process holds it.
    """
    acquire(folder, field)
    try:
        yield
    finally:
        release(folder)


def make_folder(folder: Path, field: str) -> None:
    """Makes a folder, unless it is there.

    Raises:
        OSError: If there can be none. The message names the field that says where.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"{field}: got {folder}, where no folder can be made ({error.strerror}); use another folder"
        ) from error


def acquire(folder: Path, field: str) -> None:
    """Takes the lock, once more if this process has it already; see `folder_lock`."""
    folder = folder.resolve()
    key = (os.getpid(), folder)
    if key in _held:
        _held[key].times += 1
        return
    make_folder(folder, field)
    file = _locked_file(folder / LOCK, field)
    me, other = socket.gethostname(), _record(file)
    if other.get("host", me) != me:
        file.close()
        raise RunningError(
            f"{_in_use(folder, other, field)}, which cannot be seen from {me}. If it has ended all the same "
            f"(it was killed, its machine was taken away), delete {folder / LOCK} and start again"
        )
    file.truncate(0)
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    json.dump({"host": me, "pid": os.getpid(), "since": since}, file)
    file.flush()
    _held[key] = _Held(file)


def release(folder: Path) -> None:
    """Gives back what `acquire` took."""
    folder = folder.resolve()
    key = (os.getpid(), folder)
    _held[key].times -= 1
    if not _held[key].times:
        (folder / LOCK).unlink(missing_ok=True)
        _held.pop(key).file.close()


def _locked_file(path: Path, field: str) -> TextIO:
    """Returns the file, open and locked. The kernel takes the lock back when the process ends."""
    while True:
        file = _opened(path, field)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = False
        except OSError as error:
            taken = error.errno not in _NO_LOCKS or _is_alive(_record(file))
        if taken:
            message = (
                f"{_in_use(path.parent, _record(file), field)}. Wait for its end, stop it, or take another {field}"
            )
            file.close()
            raise RunningError(message)
        if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            return file
        file.close()  # it was deleted between the two calls, by the run that ended


def _opened(path: Path, field: str) -> TextIO:
    try:
        return open(path, "a+", encoding="utf-8")
    except IsADirectoryError as error:
        raise OSError(f"{field}: {path}: expected a file or nothing, got a folder; delete it") from error
    except OSError as error:
        raise OSError(
            f"{field}: got {path.parent}, where no file can be written ({error.strerror}); expected a folder that can "
            "be written, also for a run that is finished: a copy of this one, or another"
        ) from error


def _record(file: TextIO) -> dict[str, Any]:
    """Returns who holds the lock or has held it last; nothing if that was not written to its end, or is not known."""
    file.seek(0)
    try:
        record = json.load(file)
    except (ValueError, RecursionError):
        return {}
    is_whole = isinstance(record, dict) and isinstance(record.get("host"), str)
    return {"pid": "of unknown number", "since": "an unknown time"} | record if is_whole else {}


def _is_alive(record: dict[str, Any]) -> bool:
    if record.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(record["pid"]), 0)
    except (ProcessLookupError, TypeError, ValueError, OverflowError):
        return False
    except PermissionError:
        pass  # of another user
    return True


def _in_use(folder: Path, record: dict[str, Any], field: str) -> str:
    who = "process {pid} on {host} since {since}".format_map(record) if record else "another process"
    return f"{field}: {folder} is in use by {who}"
