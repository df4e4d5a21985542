"""What the main process finds out or does for all ranks of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments

T = TypeVar("T")


def on_main_process(args: TrainingArguments, action: Callable[[], T]) -> T:
    """Returns on every rank what `action` returns on the main process; its error is raised on every rank. Collective.

    Args:
        args: They know the ranks.
        action: Called on the main process alone. What it returns or raises has to be small, and be something to pickle.
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
