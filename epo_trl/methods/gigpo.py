"""GiGPO's credit (arXiv 2505.10978): an episode relative to its group, and a turn relative to others in its state."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import ClassVar

import torch

from epo_trl.methods.base import Batch, Credit, Method, Need
from epo_trl.methods.token_statistics import on_tokens
from epo_trl.objectives.gae import rewards_to_go


@dataclass
class GiGPO(Method):
    """`A = A_E + step_weight * A_S`, equal for all tokens of a turn.

    `A_E` is GRPO's advantage of the episode. Turns of one group, on all ranks, in which the agent saw the same text
    form an anchor group. `A_S` is the discounted return from a turn, minus the mean of its anchor group, divided by its
    standard deviation. A turn without another in its state has `A_S` 0.

    An invalid turn's reward includes its penalty, so the penalty is discounted into the returns of earlier turns. The
    authors' code subtracts it from the return of that turn alone, after discounting.

    Args:
        gamma: Discount from turn to turn in `A_S`. The paper uses 0.95.
        step_weight: Weight of `A_S`. The paper uses 1.
        scale: Whether to divide `A_S` by the standard deviation of the anchor group. The paper describes both; the
            default of the authors' code, `mean_norm`, does not divide.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.GROUPS, Need.TURN_REWARDS})

    gamma: float = 0.95
    step_weight: float = 1.0
    scale: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma: expected a number from 0 to 1, got {self.gamma}")
        if not self.step_weight >= 0:
            raise ValueError(f"step_weight: expected a number >= 0, got {self.step_weight}")

    def model_card_text(self) -> str:
        """Returns the method's name and its paper."""
        return "[GiGPO](https://arxiv.org/abs/2505.10978)"

    def credit(self, batch: Batch) -> Credit:
        """Returns one advantage per turn."""
        returns = rewards_to_go(batch.turn_rewards.double(), self.gamma).tolist()
        groups = batch.group_ids.tolist()
        seen = [
            (group, turn.observation, value)
            for group, episode, row in zip(groups, batch.episodes, returns, strict=True)
            for turn, value in zip(episode.turns * episode.is_usable, row, strict=False)
        ]
        anchors: dict[tuple[int, str], list[float]] = defaultdict(list)
        for group, observation, value in batch.ranks.gather(seen):
            anchors[group, observation].append(value)
        steps = torch.zeros_like(batch.turn_rewards)
        for i, (group, episode) in enumerate(zip(groups, batch.episodes, strict=True)):
            for k, turn in enumerate(episode.turns * episode.is_usable):
                steps[i, k] = self._relative_advantage(returns[i][k], anchors[group, turn.observation])
        per_turn = batch.group_advantages.unsqueeze(1) + self.step_weight * steps
        return Credit(on_tokens(per_turn, batch) * batch.mask)

    def _relative_advantage(self, value: float, anchor: list[float]) -> float:
        if len(anchor) < 2:
            return 0.0
        return (value - fmean(anchor)) / (stdev(anchor) + 1e-6 if self.scale else 1.0)
