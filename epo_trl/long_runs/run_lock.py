"""One run per output folder with any number of ranks: a lock, and work that the main process does for all ranks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainingArguments

from epo_trl.errors import InputError
from epo_trl.long_runs.folder_lock import LOCK, RunningError, folder_lock

__all__ = ["LOCK", "RunningError", "on_main_process", "run_lock"]

T = TypeVar("T")
SECONDS_UNTIL_SEEN = 60.0  # delay until a network file system shows a new file to other machines


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
        lock = on_main_process(args, lambda: held.enter_context(folder_lock(folder, "output_dir")))
        if args.world_size > 1 and not args.save_on_each_node:
            _check_shared(folder, lock)
        yield


def _check_shared(folder: Path, lock: str) -> None:
    """Raises `InputError` on all ranks if one of them does not see the lock. Collective.

    Checkpoints hold files of every rank, and all ranks read them on resume.
    """
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
