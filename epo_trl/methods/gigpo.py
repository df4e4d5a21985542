"""GiGPO's credit (arXiv 2505.10978): an episode relative to its group, and a turn relative to others in its state."""

from __future__ import annotations

from dataclasses import dataclass

from epo_trl.bounds import Share
from epo_trl.methods.anchors import EpisodeAndTurn, compare_by_key, largest_reward_sum, sample_deviation
from epo_trl.methods.base import Batch


@dataclass
class GiGPO(EpisodeAndTurn):
    """`A = A_E + step_weight * A_S`, equal for all tokens of a turn.

    `A_E` is GRPO's advantage of the episode. Turns of one group, on all ranks, that start from the same state form an
    anchor group. `A_S` is the discounted return from a turn, minus the mean of its anchor group, divided by its
    standard deviation. A turn without another in its state has `A_S` 0.

    An invalid turn's reward includes its penalty, so the penalty is discounted into the returns of earlier turns. The
    authors' code subtracts it from the return of that turn alone, after discounting.

    Args:
        gamma: Discount from turn to turn in `A_S`. The paper uses 0.95.
        anchor: "observation", as in the paper, or "state" (see `Anchored`).
        anchor_turns: Number of observations or states that must be equal; 1 in the paper.
        step_weight: Weight of `A_S`. The paper uses 1.
        scale: Whether to divide `A_S` by the standard deviation of the anchor group. The paper describes both; the
            default of the authors' code, `mean_norm`, does not divide.
    """

    card = "[GiGPO](https://arxiv.org/abs/2505.10978)"

    gamma: Share = 0.95
    scale: bool = True

    def turn_advantages(self, batch: Batch) -> list[list[float]]:
        """Returns `A_S`."""
        divisor, size = sample_deviation if self.scale else None, largest_reward_sum(batch)
        return compare_by_key(self.keyed_returns(batch, self.gamma), batch, divisor=divisor, size=size)
