"""Critic-free credits from the reward of the whole episode: RLOO (arXiv 2402.14740), REINFORCE++ (2501.03262)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

import torch
from torch import Tensor

from epo_trl.methods.anchors import ROUNDING, gather_by_key
from epo_trl.methods.base import Batch, Credit, Method, Need
from epo_trl.methods.token_statistics import token_extremes, token_moments


@dataclass
class RLOO(Method):
    """`A = R - mean of R over the other episodes of the task`, equal for all tokens of an episode.

    R is the sum of the turns' rewards. Episodes without a signal are left out; an episode without another has A 0.
    """

    card: ClassVar[str] = "[RLOO](https://arxiv.org/abs/2402.14740)"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.GROUPS, Need.TURN_REWARDS})

    def credit(self, batch: Batch) -> Credit:
        """Returns one advantage per episode."""
        means, counts = _group_means(batch)
        leave_one_out = counts / (counts - 1).clamp(min=1)  # R - mean of the others = (R - mean of all) n / (n - 1)
        advantages = (batch.turn_rewards.double().sum(1) - means) * leave_one_out
        return Credit(advantages.float().unsqueeze(1) * batch.mask)


@dataclass
class ReinforcePlusPlus(Method):
    """The episode's reward R, normalized over all counted tokens of the batch and of all ranks.

    Advantages are 0 if all R are equal up to rounding.

    Args:
        baseline: Whether to subtract the mean R of the task's episodes first ("REINFORCE++-baseline").
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.TURN_REWARDS})

    baseline: bool = True

    def model_card_text(self) -> str:
        """Returns the method's name and its paper."""
        return f"[REINFORCE++{'-baseline' * self.baseline}](https://arxiv.org/abs/2501.03262)"

    def credit(self, batch: Batch) -> Credit:
        """Returns one advantage per episode."""
        rewards = batch.turn_rewards.double()
        returns = rewards.sum(1)
        if self.baseline:
            returns = returns - _group_means(batch)[0]
        advantages, sizes = (x.unsqueeze(1).expand(batch.mask.shape) for x in (returns, rewards.abs().sum(1)))
        low, high = token_extremes(advantages, batch)
        if high - low <= ROUNDING * token_extremes(sizes, batch)[1]:
            return Credit(torch.zeros_like(advantages, dtype=torch.float32))
        mean, deviation = token_moments(advantages, batch)
        return Credit(((advantages - mean) / (deviation + 1e-8)).float() * batch.mask)


def _group_means(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns (B,) the mean reward of each episode's group and the number of its episodes; 0, 1 without a signal."""
    rewards, ids = batch.turn_rewards.double().sum(1), batch.group_ids.tolist()
    rows = [
        [(group, reward)] if episode.is_usable else []
        for group, reward, episode in zip(ids, rewards.tolist(), batch.episodes, strict=True)
    ]
    groups = gather_by_key(rows, batch)
    own = [groups[row[0][0]] if row else [0.0] for row in rows]
    return rewards.new_tensor([fmean(group) for group in own]), rewards.new_tensor([len(group) for group in own])
