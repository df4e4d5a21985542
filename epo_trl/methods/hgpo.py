"""HGPO's credit (arXiv 2602.22817): a turn relative to others with the same last observations, at several depths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epo_trl.bounds import Count, Finite, Share
from epo_trl.methods.anchors import Anchored, compare_by_key, largest_reward_sum, population_deviation
from epo_trl.methods.base import Batch


@dataclass
class HGPO(Anchored):
    """`A = sum_k w_k A_k / sum_k w_k` with `w_k = (k + 1) ** alpha`, equal for all tokens of a turn.

    `A_k` is the discounted return from a turn, relative to the turns of its group with the same last k observations,
    for k from 1 to `anchor_turns`. The sums run over the depths at which `A_k` is not 0, as in the authors' code: a
    depth at which a turn is alone does not dilute the others.

    Args:
        gamma: Discount from turn to turn. The authors' code uses 0.95.
        anchor: "observation", as in the paper, or "state" (see `Anchored`).
        anchor_turns: Largest depth. The paper compares up to 2 or 4 earlier observations: 3 or 5.
        alpha: How much more a deeper comparison weighs. The paper uses 1.
    """

    card = "[HGPO](https://arxiv.org/abs/2602.22817), up to {anchor_turns} observations"

    anchor_turns: Count = 3
    gamma: Share = 0.95
    alpha: Finite = 1.0

    def turn_advantages(self, batch: Batch) -> list[list[float]]:
        """Returns the weighted mean over the depths."""
        size = largest_reward_sum(batch)
        by_depth = [
            compare_by_key(self.keyed_returns(batch, self.gamma, depth), batch, divisor=population_deviation, size=size)
            for depth in range(1, self.anchor_turns + 1)
        ]
        # A turn has as many depths as observations before and with it.
        return [
            [self._weighted_mean(depths[: k + 1]) for k, depths in enumerate(zip(*rows, strict=True))]
            for rows in zip(*by_depth, strict=True)
        ]

    def _weighted_mean(self, advantages: Sequence[float]) -> float:
        given = [(depth + 1, value) for depth, value in enumerate(advantages, 1) if value != 0]
        heaviest = (max if self.alpha > 0 else min)((base for base, _ in given), default=1)
        weights = [((base / heaviest) ** self.alpha, value) for base, value in given]  # at most 1: none overflows
        total = sum(weight for weight, _ in weights)
        return sum(weight * value for weight, value in weights) / total if weights else 0.0
