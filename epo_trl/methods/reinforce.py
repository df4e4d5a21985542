"""Critic-free credits from the reward of the whole episode: RLOO (arXiv 2402.14740), REINFORCE++ (2501.03262)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epo_trl.methods.anchors import ROUNDING, compare_by_key, largest_reward_sum
from epo_trl.methods.base import Batch, Credit, Method, Need
from epo_trl.methods.token_statistics import token_extremes, token_moments


@dataclass
class RLOO(Method):
    """`A = R - mean of R over the other episodes of the task`, equal for all tokens of an episode.

    An episode without another has A 0, as have those of a group whose R are equal up to rounding.
    """

    card = "[RLOO](https://arxiv.org/abs/2402.14740)"
    needs = {Need.GROUPS, Need.TURN_REWARDS}

    def credit(self, batch: Batch) -> Credit:
        size = largest_reward_sum(batch)
        # Divided by (n - 1) / n, since the mean of all n is nearer to a value than the mean of the others is.
        rows = compare_by_key(_returns(batch), batch, divisor=lambda all_n: (len(all_n) - 1) / len(all_n), size=size)
        return Credit(batch.turn_rewards.new_tensor([sum(row) for row in rows]).unsqueeze(1) * batch.mask)


@dataclass
class ReinforcePlusPlus(Method):
    """The episode's reward R, normalized over all counted tokens of the batch and of all ranks.

    Advantages are 0 if all R are equal up to rounding.

    Args:
        baseline: Whether to subtract the mean R of the task's episodes first ("REINFORCE++-baseline").
    """

    card = "[REINFORCE++](https://arxiv.org/abs/2501.03262), baseline: {baseline}"
    needs = {Need.TURN_REWARDS}

    baseline: bool = True

    def credit(self, batch: Batch) -> Credit:
        size, rows = largest_reward_sum(batch), _returns(batch)
        values = (
            compare_by_key(rows, batch, divisor=None, size=size)
            if self.baseline
            else [[value for _, value in row] for row in rows]
        )
        returns = torch.tensor([sum(row) for row in values], dtype=torch.float64, device=batch.mask.device)
        advantages = returns.unsqueeze(1).expand(batch.mask.shape)
        low, high = token_extremes(advantages, batch)
        if high - low <= ROUNDING * size:
            return Credit(torch.zeros_like(advantages, dtype=torch.float32))
        mean, deviation = token_moments(advantages, batch)
        return Credit(((advantages - mean) / (deviation + 1e-8)).float() * batch.mask)


def _returns(batch: Batch) -> list[list[tuple[int, float]]]:
    """Returns rows of (group, reward of the episode); none without a signal."""
    rewards, groups = batch.turn_rewards.double().sum(1).tolist(), batch.group_ids.tolist()
    return [
        [(group, reward)] if episode.is_usable else []
        for group, reward, episode in zip(groups, rewards, batch.episodes, strict=True)
    ]
