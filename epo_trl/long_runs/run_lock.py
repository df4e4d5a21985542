"""One run at a time in a folder, whatever the number of its ranks."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate.utils import gather_object
from transformers import TrainingArguments

from epo_trl.long_runs.folder_lock import LOCK, RunningError, acquire, release
from epo_trl.long_runs.main_process import on_main_process

__all__ = ["LOCK", "RunningError", "run_lock"]

SECONDS_UNTIL_SEEN = 60.0  # a network file system may show a new file to other machines that late


@contextmanager
def run_lock(args: TrainingArguments) -> Iterator[None]:
    """Keeps other runs out of `args.output_dir` for the time of the block. Collective: one lock for all ranks.

    The lock goes with its process, however that ends. Blocks of one process may lie within each other.

    Raises:
        RunningError: If another process holds it. On another machine it may have ended unseen; the message says what
            to do then.
        ValueError: If a rank does not see the folder of the main process, unless `save_on_each_node` asks for folders
            of their own. Raised on every rank.
    """
    folder = Path(args.output_dir)
    lock = on_main_process(args, lambda: _acquired(folder))
    try:
        if args.world_size > 1 and not args.save_on_each_node:
            _check_shared(folder, lock)
        yield
    finally:
        if args.process_index == 0:
            release(folder)


def _acquired(folder: Path) -> str:
    acquire(folder, "output_dir")
    return (folder / LOCK).read_text(encoding="utf-8")


def _check_shared(folder: Path, lock: str) -> None:
    """Raises `ValueError` on all ranks if one of them does not see the lock. Collective.

    Checkpoints have files of every rank, and all ranks read them when a run goes on.
    """
    end = time.monotonic() + SECONDS_UNTIL_SEEN
    while not (seen := _holds(folder / LOCK, lock)) and time.monotonic() < end:
        time.sleep(min(1.0, SECONDS_UNTIL_SEEN))
    blind = sorted(set(gather_object([] if seen else [socket.gethostname()])))
    if blind:
        raise ValueError(
            f"output_dir: got {folder}, which {', '.join(blind)} does not share with the main process; expected a "
            "folder that all machines of the run see, on a shared file system (docs/multi_node.md)"
        )


def _holds(file: Path, text: str) -> bool:
    try:
        return file.read_text(encoding="utf-8") == text
    except OSError:
        return False
