"""Stops a run after too many non-finite updates in a row, which it skips, or at a batch with too many aborted episodes.

Training on the rest of such a batch would hide the fault. An episode whose first prompt does not fit counts as aborted:
it has no turn to learn from.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from epo_trl.errors import EpoTrlError
from epo_trl.types import Episode

FOLDER = "_nonfinite"  # in `output_dir`; the Hub client uploads nothing that begins with "_"
SHOWN = 3  # errors shown per rank
NO_TURN = "max_prompt_length leaves no room for its first prompt"


class NonFiniteError(EpoTrlError, RuntimeError):
    """The loss or gradient was non-finite in too many updates in a row."""


def spread_nonfinite(loss: Tensor) -> Tensor:
    """Returns the loss, modified so that a non-finite loss makes all its gradients NaN.

    One check of the gradient norm then detects both, on all ranks, since gradients are summed over ranks.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, float("nan"))


@dataclass
class UpdateGuard:
    """Counts skipped updates."""

    limit: int  # number of consecutive skipped updates that ends the run
    output_dir: str  # the batch of the last one is saved in `_nonfinite` there
    skipped: int = field(default=0, init=False)
    in_a_row: int = field(default=0, init=False)
    losses: list[Tensor] = field(default_factory=list, init=False)  # of the micro-batches, for the error message

    def end_update(self, grad_norm: float, step: int, rank: int, batch: Callable[[], Any]) -> None:
        """Counts one update, which is skipped if the norm of its gradient is not finite.

        Raises:
            NonFiniteError: If the limit is reached, after the collected batch of this rank was saved.
        """
        losses, self.losses = self.losses, []
        is_finite = math.isfinite(grad_norm)
        self.in_a_row, self.skipped = 0 if is_finite else self.in_a_row + 1, self.skipped + (not is_finite)
        if self.in_a_row < self.limit:
            return
        shown = [float(loss) for loss in losses]
        os.makedirs(folder := os.path.join(self.output_dir, FOLDER), exist_ok=True)
        path = os.path.join(folder, f"step_{step:06d}_rank{rank}.pt")
        torch.save({"step": step, "losses": shown, "grad_norm": grad_norm, "batch": batch()}, path)
        raise NonFiniteError(
            f"max_skipped_updates: {self.in_a_row} consecutive updates had a non-finite loss or gradient, the limit is "
            f"{self.limit}; step {step}, rank {rank}: losses {shown}, gradient norm {grad_norm}. The "
            f"weights are those of the last finite update, the collected batch is in {path} (read it with torch.load)"
        )


def check_skipped(grad_norm: float, was_skipped: Callable[[], bool]) -> None:
    """Raises `NonFiniteError` if DeepSpeed, which updates inside its backward pass, applied a non-finite gradient."""
    if not was_skipped():
        raise NonFiniteError(
            f"deepspeed: expected a skipped update for gradient norm {grad_norm}, but DeepSpeed updated the weights: "
            "set `check_grad_overflow: true` in the `bf16` block of its configuration"
        )


class TooManyAborted(EpoTrlError, RuntimeError):
    """More episodes of a batch were aborted than `max_aborted_share` allows."""


def first_errors(episodes: Sequence[Episode], rank: int) -> list[str]:
    """Returns the errors of the first aborted episodes of a rank."""
    aborted = [episode for episode in episodes if not episode.is_usable]
    return [f"rank {rank}, task {episode.task_id!r}: {episode.error or NO_TURN}" for episode in aborted[:SHOWN]]
