"""Says in words when RL steps in a row had nothing to compare: every episode of every group got the same reward."""

from __future__ import annotations

import torch
from torch import Tensor

PATIENCE = 3  # RL steps in a row


def equal_within_groups(rewards: Tensor, group: int) -> bool:
    """Returns whether no group has two different rewards.

    Args:
        rewards: (N, F) of N episodes by F reward functions, NaN where there is none; members of a group are neighbours.
        group: Episodes that are compared with each other.
    """
    groups = rewards.view(-1, group, rewards.shape[1])
    low, high = groups.nan_to_num(torch.inf).amin(1), groups.nan_to_num(-torch.inf).amax(1)
    # Not exactly: a mean of equal float32 numbers can differ from them, and so can rewards that were summed in turns.
    return bool((high - low <= 1e-6 * high.abs().clamp(min=1)).all())


class EqualRewards:
    """Counts RL steps in a row with equal rewards.

    Args:
        patience: So many of them are a stretch.
    """

    def __init__(self, patience: int = PATIENCE):
        self.patience = patience
        self.steps = 0

    def add(self, equal: bool) -> bool:
        """Adds an RL step; returns whether a stretch has become long enough to warn of, once per stretch."""
        self.steps = self.steps + 1 if equal else 0
        return self.steps == self.patience

    def warning(self, rl_step: int, success: float, compared: str) -> str:
        """Returns what it means and what to do.

        Args:
            rl_step: The last one of the stretch, from 0.
            success: Share of its episodes that solved their task.
            compared: What had equal rewards, for example "every group".
        """
        if success == 1:
            advice = "the tasks are solved already: take harder ones, or stop here"
        else:
            advice = (
                "start from a policy that solves some of the tasks (warm start: recipes/sft.py), play more episodes of "
                "each task (num_generations), take easier tasks or more turns, or pay for parts of a task "
                "(env_reward_weight, or a reward function of your own)"
            )
        return (
            f"In each of the last {self.patience} RL steps (up to {rl_step}) the episodes of {compared} got equal "
            f"rewards, {success:.0%} of them solved. There was nothing to compare, so rewards teach nothing; only "
            f"entropy and KL terms still move the policy. What helps: {advice}."
        )
