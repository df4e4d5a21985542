"""GAGPO's credit (arXiv 2605.13217): generalized advantage estimation with group means in place of a critic."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from epo_trl.bounds import Share
from epo_trl.methods.anchors import Anchored, compare_by_key, sample_deviation
from epo_trl.methods.base import Batch
from epo_trl.methods.token_statistics import gather_by_key


@dataclass
class GAGPO(Anchored):
    """GAE from turn to turn, with a value that is the mean return of the group's turns in the same state.

        V(s) = mean discounted return from the group's turns in state s,  0 after the last turn
        delta_t = r_t + gamma V(s_t+1) - V(s_t),   A_t = delta_t + gamma gae_lambda A_t+1

    `A` is then normalized over all turns of the group. The paper's ratio per turn is `policy_method: gspo`. Only a
    digest of the paper was read, so `gae_lambda` and the normalization by a sample's deviation are ours.

    Args:
        gamma: Discount from turn to turn.
        anchor: "observation", as in the paper, or "state" (see `Anchored`).
        anchor_turns: Number of observations or states that must be equal; 1 in the paper.
        gae_lambda: Lambda of GAE.
    """

    card = "[GAGPO](https://arxiv.org/abs/2605.13217), lambda {gae_lambda:g}"

    gamma: Share = 0.95
    gae_lambda: Share = 0.95

    def turn_advantages(self, batch: Batch) -> list[list[float]]:
        """Returns the normalized advantages."""
        keyed = self.keyed_returns(batch, self.gamma)
        groups = gather_by_key(keyed, batch)
        rows: list[list[tuple[int, float]]] = []
        for turns, rewards in zip(keyed, batch.turn_rewards.tolist(), strict=True):
            values = [*(fmean(groups[key]) for key, _ in turns), 0.0]
            rows.append([])
            later = 0.0
            for k, ((group, _), _) in reversed(list(enumerate(turns))):
                delta = rewards[k] + self.gamma * values[k + 1] - values[k]
                later = delta + self.gamma * self.gae_lambda * later
                rows[-1].insert(0, (group, later))
        size = max((abs(value) for values in groups.values() for value in values), default=0.0)
        return compare_by_key(rows, batch, divisor=sample_deviation, size=size)
