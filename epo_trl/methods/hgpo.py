"""HGPO's credit (arXiv 2602.22817): a turn relative to others with the same last observations, at several depths."""

from __future__ import annotations

from dataclasses import dataclass

from epo_trl.bounds import Count, Finite, Share
from epo_trl.methods.anchors import Anchored, discounted_returns, gather_by_key, relative, usable_rows
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
        base_group: Whether GRPO's advantage of the episode takes part as `A_0`. False in the paper's runs.
        scale: Whether to divide `A_k` by the standard deviation of its group. True in the paper's runs.
    """

    anchor_turns: Count = 3
    gamma: Share = 0.95
    alpha: Finite = 1.0
    base_group: bool = False
    scale: bool = True

    def model_card_text(self) -> str:
        """Returns the method's name, its paper and its depth."""
        return f"[HGPO](https://arxiv.org/abs/2602.22817), up to {self.anchor_turns} observations"

    def turn_advantages(self, batch: Batch) -> list[list[float]]:
        """Returns the weighted mean over the depths."""
        returns = discounted_returns(batch, self.gamma)
        keys = {  # a turn has as many depths as observations before and with it
            (i, k, depth): (group, depth, states[k])
            for i, group, episode in usable_rows(batch)
            for depth in range(1, self.anchor_turns + 1)
            for states in [self.states(episode, depth)]
            for k in range(depth - 1, len(episode.turns))
        }
        groups = gather_by_key([(key, returns[i][k]) for (i, k, _), key in keys.items()], batch)
        rows: list[list[float]] = [[] for _ in batch.episodes]
        for i, _, episode in usable_rows(batch):
            base = [(0, float(batch.group_advantages[i]))] if self.base_group else []
            for k in range(len(episode.turns)):
                depths = range(1, min(self.anchor_turns, k + 1) + 1)
                found = [
                    (depth, relative(returns[i][k], groups[keys[i, k, depth]], scale=self.scale, sample=False))
                    for depth in depths
                ]
                rows[i].append(self._weighted_mean([*base, *found]))
        return rows

    def _weighted_mean(self, advantages: list[tuple[int, float]]) -> float:
        weights = [((depth + 1) ** self.alpha, value) for depth, value in advantages if value != 0]
        total = sum(weight for weight, _ in weights)
        return sum(weight * value for weight, value in weights) / total if weights else 0.0
