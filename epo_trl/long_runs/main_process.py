"""Runs a function on the main process and shares its result with all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments

T = TypeVar("T")


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
