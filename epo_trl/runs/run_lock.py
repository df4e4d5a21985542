"""One process at a time for each folder or file that a command owns, and one lock for all ranks of a run.

The lock file names its holder. Locking a folder loads no torch.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from epo_trl.errors import EpoTrlError, FileError, InputError

if TYPE_CHECKING:
    from transformers import TrainingArguments

T = TypeVar("T")
SECONDS_UNTIL_SEEN = 60.0  # delay until a network file system shows a new file to other machines
LOCK = "_running.json"  # in the folder; the Hub client uploads nothing that begins with "_"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)  # errors of file systems without locks


class RunningError(EpoTrlError, RuntimeError):
    """Another process uses the folder."""


# Contents of the lock files that this process holds. The keys hold the process id, so a forked child holds none.
_held: dict[tuple[int, Path], str] = {}


def folder_lock(folder: Path, field: str) -> AbstractContextManager[str]:
    """Locks the folder for the duration of the block; yields the content of the lock file. Reentrant in a process.

    Args:
        folder: Folder to lock; created if it is missing.
        field: Setting that holds the path, shown in messages.

    Raises:
        RunningError: If another process holds it.
    """
    folder = folder.resolve()
    return _lock(folder / LOCK, folder, field)


def place_lock(path: Path, field: str) -> AbstractContextManager[str]:
    """Does as `folder_lock` for a file, or for a folder that must be new: the lock file is beside it."""
    path = path.absolute()
    return _lock(path.with_name(f"{Path(LOCK).stem}-{path.name}.json"), path, field)


@contextmanager
def _lock(lock: Path, owned: Path, field: str) -> Iterator[str]:
    key = (os.getpid(), lock)
    if key in _held:
        yield _held[key]
        return
    make_folder(lock.parent, field)
    with _locked_file(lock, owned, field) as file:
        me, other = socket.gethostname(), _record(file)
        if other.get("host", me) != me:
            raise RunningError(
                f"{_in_use(owned, other, field)}, which cannot be checked from {me}. If it has ended (it was killed, "
                f"its machine is gone), delete {lock} and start again"
            )
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        record = json.dumps({"host": me, "pid": os.getpid(), "since": since})
        file.truncate(0)
        file.write(record)
        file.flush()
        _held[key] = record
        try:
            yield record
        finally:
            del _held[key]
            lock.unlink(missing_ok=True)


def make_folder(folder: Path, field: str) -> None:
    """Creates a folder unless it exists.

    Raises:
        FileError: If the folder cannot be created. The message names the field.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"{field}: expected a folder that can be created, got {folder} ({error.strerror}); use another folder"
        ) from error


def _locked_file(path: Path, owned: Path, field: str) -> TextIO:
    """Opens and locks the file. The kernel releases the lock when the process ends."""
    while True:
        file = _opened(path, field)
        advice = f"Wait until it ends, stop it, or use another {field}"
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = False
        except OSError as error:
            has_locks = error.errno not in _NO_LOCKS
            taken = has_locks or _is_alive(_record(file))
            if not has_locks:
                advice += f". If it has ended (its id may belong to another program), delete {path} and start again"
        if taken:
            message = f"{_in_use(owned, _record(file), field)}. {advice}"
            file.close()
            raise RunningError(message)
        if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            return file
        file.close()  # the run that ended deleted it between the two calls


def _opened(path: Path, field: str) -> TextIO:
    try:
        return open(path, "a+", encoding="utf-8")
    except IsADirectoryError as error:
        raise FileError(f"{field}: expected {path} to be a file or absent, got a folder; delete it") from error
    except OSError as error:
        raise FileError(
            f"{field}: expected a writable folder, also for a finished run, got {path.parent} ({error.strerror}); use "
            "a writable copy or another folder"
        ) from error


def _record(file: TextIO) -> dict[str, Any]:
    """Returns the record of the current or last holder; `{}` if it is incomplete."""
    file.seek(0)
    try:
        record = json.load(file)
    except (ValueError, RecursionError):
        return {}
    kinds = {"host": str, "pid": int, "since": str}
    is_whole = isinstance(record, dict) and all(isinstance(record.get(name), kind) for name, kind in kinds.items())
    return record if is_whole else {}


def _is_alive(record: dict[str, Any]) -> bool:
    """Returns whether another process of this machine has the id of the holder.

    If this process has it, the holder ran in a container that was restarted, or its id was given anew.
    """
    if record.get("host") != socket.gethostname() or record["pid"] < 1 or record["pid"] == os.getpid():
        return False
    try:
        os.kill(record["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it belongs to another user
    return True


def _in_use(owned: Path, record: dict[str, Any], field: str) -> str:
    who = "process {pid} on {host} since {since}".format_map(record) if record else "another process"
    return f"{field}: {owned} is in use by {who}"


def on_main_process(args: TrainingArguments, action: Callable[[], T]) -> T:
    """Calls `action` on the main process and returns its result, or raises its error, on every rank. Collective.

    Args:
        args: Training arguments, which hold the ranks.
        action: Called on the main process only. Its result or error must be small and picklable.
    """
    outcome: list[tuple[T | None, Exception | None]] = [(None, None)]
    if args.process_index == 0:
        try:
            outcome = [(action(), None)]
        except Exception as error:
            outcome = [(None, error)]
    if args.world_size > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(outcome)
    value, failure = outcome[0]
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]


@contextmanager
def run_lock(args: TrainingArguments) -> Iterator[None]:
    """Locks `args.output_dir` against other runs for the duration of the block. Collective: one lock for all ranks.

    The lock is released when its process ends, even by a kill. Blocks of one process may be nested.

    Raises:
        RunningError: If another process holds the lock. If the holder ran on another machine and may have ended, the
            message explains what to do.
        ValueError: If a rank does not see the main process's folder, unless `save_on_each_node` gives each node its
            own. Raised on every rank.
    """
    folder = Path(args.output_dir)
    with ExitStack() as held:
        lock = on_main_process(args, partial(held.enter_context, folder_lock(folder, "output_dir")))
        if args.world_size > 1 and not args.save_on_each_node:
            _check_shared(folder, lock)
        yield


def _check_shared(folder: Path, lock: str) -> None:
    """Raises `InputError` on all ranks if one of them does not see the lock. Collective.

    Checkpoints hold files of every rank, and all ranks read them on resume.
    """
    from accelerate.utils import gather_object

    end = time.monotonic() + SECONDS_UNTIL_SEEN
    while not (seen := _holds(folder / LOCK, lock)) and time.monotonic() < end:
        time.sleep(min(1.0, SECONDS_UNTIL_SEEN))
    blind = sorted(set(gather_object([] if seen else [socket.gethostname()])))
    if blind:
        raise InputError(
            f"output_dir: expected a folder on a file system that all machines of the run share, got {folder}, which "
            f"{', '.join(blind)} does not share with the main process (docs/multi_node.md)"
        )


def _holds(file: Path, text: str) -> bool:
    try:
        return file.read_text(encoding="utf-8") == text
    except OSError:
        return False
