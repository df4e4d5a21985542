"""One process at a time for each folder or file that a command owns, and one lock for all ranks of a run.

Locking a folder loads no torch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from filelock import FileLock, Timeout

from epo_trl.errors import EpoTrlError, FileError

if TYPE_CHECKING:
    from transformers import TrainingArguments

T = TypeVar("T")
LOCK = "_running.lock"  # in the folder; the Hub client uploads nothing that begins with "_"


class RunningError(EpoTrlError, RuntimeError):
    """Another process uses the folder."""


def folder_lock(folder: Path, field: str) -> AbstractContextManager[None]:
    """Locks the folder for the duration of the block. Reentrant in a process; released when it ends, even by a kill.

    Args:
        folder: Folder to lock; created if it is missing.
        field: Setting that holds the path, shown in messages.

    Raises:
        FileError: If the folder cannot be written.
        RunningError: If another process holds it.
    """
    return _lock(folder.resolve() / LOCK, folder, field)


def place_lock(path: Path, field: str) -> AbstractContextManager[None]:
    """Does as `folder_lock` for a file: the lock file is beside it."""
    path = path.absolute()
    return _lock(path.with_name(f"{Path(LOCK).stem}-{path.name}.lock"), path, field)


@contextmanager
def _lock(path: Path, owned: Path, field: str) -> Iterator[None]:
    make_folder(path.parent, field)
    lock = FileLock(path, blocking=False, is_singleton=True, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise RunningError(
            f"{field}: {owned} is in use by {path.read_text() or 'another process'}. Wait until it ends, stop it, or "
            f"use another {field}"
        ) from error
    except OSError as error:
        raise FileError(f"{field}: expected a writable folder, got {path.parent} ({error.strerror})") from error
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M}")
        yield
    finally:
        if lock.lock_counter == 1:
            path.unlink(missing_ok=True)  # filelock does not take the lock of a file that was deleted meanwhile
        lock.release()


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

    Raises:
        RunningError: If another process holds the lock. Raised on every rank.
    """
    with ExitStack() as held:
        on_main_process(args, partial(held.enter_context, folder_lock(Path(args.output_dir), "output_dir")))
        yield
