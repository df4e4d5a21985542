"""GAGPO's credit (arXiv 2605.13217): generalized advantage estimation with group means in place of a critic."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from epo_trl.bounds import Share
from epo_trl.methods.anchors import Anchored, discounted_returns, gather_by_key, relative, usable_rows
from epo_trl.methods.base import Batch


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

    gamma: Share = 0.95
    gae_lambda: Share = 0.95

    def model_card_text(self) -> str:
        """Returns the method's name, its paper and lambda."""
        return f"[GAGPO](https://arxiv.org/abs/2605.13217), lambda {self.gae_lambda:g}"

    def turn_advantages(self, batch: Batch) -> list[list[float]]:
        """Returns the normalized advantages."""
        returns, rewards = discounted_returns(batch, self.gamma), batch.turn_rewards.tolist()
        states = {i: [(group, state) for state in self.states(e)[:-1]] for i, group, e in usable_rows(batch)}
        groups = gather_by_key(
            [(state, returns[i][k]) for i, row in states.items() for k, state in enumerate(row)], batch
        )
        rows: list[list[float]] = [[] for _ in batch.episodes]
        for i, row in states.items():
            later = 0.0
            values = [*(fmean(groups[state]) for state in row), 0.0]
            for k in reversed(range(len(row))):
                delta = rewards[i][k] + self.gamma * values[k + 1] - values[k]
                later = delta + self.gamma * self.gae_lambda * later
                rows[i].insert(0, later)
        whole = gather_by_key([(row[0][0], value) for i, row in states.items() for value in rows[i]], batch)
        size = max((abs(value) for values in groups.values() for value in values), default=0.0)
        return [
            [relative(value, whole[states[i][0][0]], scale=True, size=size) for value in row]
            for i, row in enumerate(rows)
        ]
