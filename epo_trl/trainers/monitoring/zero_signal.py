"""Warns about RL steps without a training signal: no token in the loss, or equal rewards in all compared episodes."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from epo_trl.methods import Comm

PATIENCE = 3  # number of consecutive RL steps with equal rewards before a warning


@dataclass
class Streak:
    """Counts consecutive RL steps in which a condition holds."""

    length: int  # of a streak, in RL steps
    _steps: int = field(default=0, init=False)

    def add(self, holds: bool) -> bool:
        """Adds an RL step; returns whether the streak has just reached its length, once per streak."""
        self._steps = self._steps + 1 if holds else 0
        return self._steps == self.length


def compared_rewards(rewards: Tensor, weights: Tensor, aggregation: str) -> Tensor:
    """Returns what TRL compares in a group: (N, 1) weighted sums, or (N, F) rewards, before it normalizes them.

    `rewards` are (N, F) of N episodes by F reward functions, NaN where there is none; a sum takes that as 0. A function
    of weight 0 is not compared. `aggregation` is TRL's `multi_objective_aggregation`.
    """
    if aggregation == "normalize_then_sum":
        return rewards[:, weights != 0]
    sums = (rewards * weights).nansum(1, keepdim=True)
    return sums.masked_fill(rewards.isnan().all(1, keepdim=True), torch.nan)


def equal_within_groups(rewards: Tensor, group: int) -> Tensor:
    """Returns (G,) booleans: whether all (N, F) rewards within a group are equal up to rounding.

    A reward may be NaN. The members of a group, so many as `group`, are adjacent.
    """
    low, high = _extremes(rewards.view(-1, group, rewards.shape[1]))
    # With a tolerance: rewards that are sums over turns have rounding errors.
    return (high - low <= 1e-6 * high.abs().clamp(min=1)).all(1)


def _extremes(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the (G, F) minimum and maximum of (G, N, F) rewards, infinite where all are NaN."""
    return rewards.nan_to_num(torch.inf).amin(1), rewards.nan_to_num(-torch.inf).amax(1)


def equal_outcomes(outcomes: Tensor, ranks: Comm) -> bool:
    """Returns whether all episodes, on all ranks, have equal rewards-to-go at each turn index. Collective.

    If so, no outcome distinguishes one action from another, and differences between advantages are errors of the
    critic. Lambda-returns cannot show this, because they bootstrap from the critic. Turns are compared at the same
    index: a reward that every episode gets in each turn makes the rewards-to-go of earlier turns larger, but this is no
    difference between episodes.
    """
    columns = zip_longest(*ranks.gather(outcomes.tolist()), fillvalue=math.nan)  # the longest episode differs by rank
    every = torch.tensor(list(columns), dtype=torch.float64).T[None]
    low, high = _extremes(every)
    return bool((high - low <= 1e-6 * every.nan_to_num(0.0).abs().max()).all())  # relative: rewards have no fixed unit


class ZeroSignalMonitor:
    """Warns once per streak of RL steps without a training signal."""

    def __init__(self, ranks: Comm) -> None:
        self.ranks = ranks
        self._equal_rewards, self._empty_batches = Streak(PATIENCE), Streak(1)

    def end_batch(self, num_episodes: Tensor, advantages: Tensor, rl_step: int, success: float) -> None:
        """Adds the credit of a batch. Collective.

        Args:
            num_episodes: Number of episodes with a token in the loss, over all ranks.
            advantages: (B, T) advantages of this rank: all 0 if all rewards that are compared are equal.
            rl_step: Index of the RL step.
            success: Share of solved episodes.
        """
        is_equal = not self.ranks.sum((advantages.abs() > 1e-4).sum().float())
        if self._equal_rewards.add(is_equal and bool(num_episodes)) and self.ranks.index == 0:
            advice = "use harder tasks, or stop here"
            if success != 1:
                advice = (
                    "start from a policy that solves some of the tasks (warm start: recipes/sft.py), play more "
                    "episodes per task (num_generations), use easier tasks or more turns, or reward partial progress "
                    "(env_reward_weight)"
                )
            warnings.warn(
                f"In each of the last {PATIENCE} RL steps (up to {rl_step}) the episodes that are compared got equal "
                f"rewards, {success:.0%} of them solved, so rewards give no gradient: {advice}.",
                stacklevel=2,
            )
        if self._empty_batches.add(not num_episodes) and self.ranks.index == 0:
            warnings.warn(
                f"No token of RL step {rl_step} is trained on: see env/aborted, rollout/cut_responses (raise "
                "max_completion_length or set mask_truncated_completions to false) and rollout/left_out_groups.",
                stacklevel=2,
            )
