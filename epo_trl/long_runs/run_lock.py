"""One run at a time in a folder, whatever the number of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import TrainingArguments

from epo_trl.long_runs.folder_lock import LOCK, RunningError, acquire, release
from epo_trl.long_runs.main_process import on_main_process

__all__ = ["LOCK", "RunningError", "run_lock"]


@contextmanager
def run_lock(args: TrainingArguments) -> Iterator[None]:
    """Keeps other runs out of `args.output_dir` for the time of the block. Collective: one lock for all ranks.

    The lock goes with its process, however that ends. Blocks of one process may lie within each other.

    Raises:
        RunningError: If another process holds it. On another machine it may have ended unseen; the message says what
            to do then.
    """
    folder = Path(args.output_dir)
    on_main_process(args, lambda: acquire(folder, "output_dir"))
    try:
        yield
    finally:
        if args.process_index == 0:
            release(folder)
