"""Entrocraft (arXiv 2604.26326): advantages of one sign only while the entropy is outside a band."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from epo_trl.errors import InputError
from epo_trl.methods.base import Batch, Method, ModifiedAdvantages, Need
from epo_trl.methods.token_statistics import token_moments, token_share
from epo_trl.objectives import scheduled_weight


@dataclass
class Entrocraft(Method):
    """Above the band only positive advantages are kept, below it only negative ones; the others become 0.

    The mean entropy over the sampled tokens of the batch, on all ranks, in nats, is compared with the band. Both edges
    move linearly from the first RL step to the last. A dropped token stays in the mean, unlike in the paper.

    Args:
        low_start: Lower edge at the first RL step. The authors use 0.6.
        low_end: Lower edge at the last RL step. The authors use 0.4.
        high_start: Upper edge at the first RL step. The authors use 0.7.
        high_end: Upper edge at the last RL step. The authors use 0.5.
    """

    card = (
        "[Entrocraft](https://arxiv.org/abs/2604.26326), entropy from [{low_start:g}, {high_start:g}] to "
        "[{low_end:g}, {high_end:g}]"
    )
    needs = {Need.SCORES}

    low_start: float = 0.6
    low_end: float = 0.4
    high_start: float = 0.7
    high_end: float = 0.5

    def __post_init__(self) -> None:
        for part in ("start", "end"):
            low, high = getattr(self, f"low_{part}"), getattr(self, f"high_{part}")
            if not 0 <= low <= high < math.inf:
                raise InputError(
                    f"low_{part}, high_{part}: expected 0 <= low_{part} <= high_{part}, got {low} and {high}"
                )

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> ModifiedAdvantages:
        low, high = (
            scheduled_weight(batch.rl_step, batch.total_rl_steps, schedule="linear", start=start, end=end)
            for start, end in ((self.low_start, self.low_end), (self.high_start, self.high_end))
        )
        entropy, _ = token_moments(batch.entropy, batch)
        kept = advantages.clamp(min=0) if entropy > high else advantages.clamp(max=0) if entropy < low else advantages
        metrics = {
            "entrocraft/low": low,
            "entrocraft/high": high,
            "entrocraft/dropped": token_share(kept != advantages, batch),
        }
        return ModifiedAdvantages(kept, metrics=metrics)
