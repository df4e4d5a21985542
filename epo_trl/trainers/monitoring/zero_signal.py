"""Where equal rewards leave no training signal: in a group, or with a critic in the whole batch."""

from __future__ import annotations

import math
from itertools import zip_longest

import torch
from torch import Tensor

from epo_trl.methods import Comm


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
