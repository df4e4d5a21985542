"""Says in words when RL steps teach nothing: no token is trained on, or every episode that is compared got the same."""

from __future__ import annotations

import math
import warnings
from itertools import zip_longest

import torch
from torch import Tensor

from epo_trl.methods import Methods, Need, Ranks
from epo_trl.trainers.config import EPOConfig

PATIENCE = 3  # RL steps in a row with equal rewards


class Stretch:
    """Counts RL steps in a row of which something holds.

    Args:
        length: So many of them are a stretch.
    """

    def __init__(self, length: int):
        self.length = length
        self._steps = 0

    def add(self, holds: bool) -> bool:
        """Adds an RL step; returns whether a stretch has just become long enough, once for each stretch."""
        self._steps = self._steps + 1 if holds else 0
        return self._steps == self.length


def equal_within_groups(rewards: Tensor, group: int) -> bool:
    """Returns whether no group has two different rewards.

    Args:
        rewards: (N, F) of N episodes by F reward functions, NaN where there is none; members of a group are neighbours.
        group: Episodes that are compared with each other.
    """
    low, high = _extremes(rewards.view(-1, group, rewards.shape[1]))
    # Not exactly: rewards that are sums over turns are rounded on the way.
    return bool((high - low <= 1e-6 * high.abs().clamp(min=1)).all())


def _extremes(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (G, F) lowest and highest of (G, N, F), infinite where all are NaN."""
    return rewards.nan_to_num(torch.inf).amin(1), rewards.nan_to_num(-torch.inf).amax(1)


def equal_outcomes(outcomes: Tensor, ranks: Ranks) -> bool:
    """Returns whether no two episodes, on whichever ranks, differ in the rewards from a turn on. Collective.

    Then no outcome tells one action from another, and what differs among advantages is the critic's own error.
    Lambda-returns could not tell: they bootstrap from the critic. Turns are compared with those of the same index, so
    it is no difference that an early turn has more of what all episodes pay in each turn before it.

    Args:
        outcomes: See `Credit`. This rank's.
        ranks: The processes.
    """
    columns = zip_longest(*ranks.gather(outcomes.tolist()), fillvalue=math.nan)  # ranks differ in their longest episode
    every = torch.tensor(list(columns), dtype=torch.float64).T[None]
    low, high = _extremes(every)
    return bool((high - low <= 1e-6 * every.nan_to_num(0.0).abs().max()).all())  # PPO does not know units of reward


def equal_rewards_warning(rl_step: int, success: float, compared: str) -> str:
    """Returns what a stretch of equal rewards means and what to do.

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
        f"In each of the last {PATIENCE} RL steps (up to {rl_step}) the episodes of {compared} got equal rewards, "
        f"{success:.0%} of them solved. There was nothing to compare, so rewards teach nothing; only entropy and KL "
        f"terms still move the policy. What helps: {advice}."
    )


def empty_batch_warning(rl_step: int) -> str:
    """Returns what a batch without a token in the loss means and what to do."""
    return (
        f"No token of RL step {rl_step} is trained on: every episode was aborted, or its last response was cut and "
        "mask_truncated_completions leaves it out. What helps: raise max_completion_length, set "
        "mask_truncated_completions to false, and see env/aborted and rollout/cut_responses."
    )


class SilentSteps:
    """Warns, once for each stretch of RL steps that teach nothing.

    Args:
        compared: Number of episodes whose rewards are compared with each other.
        name: What they are called, for example "every group".
        ranks: The processes; the first one warns.
        by_turns: Whether turns are compared too, or a critic is asked, so that episodes of equal rewards may have
            advantages.
    """

    def __init__(self, compared: int, name: str, ranks: Ranks, *, by_turns: bool = False):
        self._compared, self._name, self._ranks, self._by_turns = compared, name, ranks, by_turns
        self._equal_rewards, self._empty_batches = Stretch(PATIENCE), Stretch(1)
        self._equal, self._success = False, 0.0  # of the batch that is collected

    def add_rewards(self, rewards: Tensor, *, success: float) -> None:
        """Adds the rewards of a batch, see `equal_within_groups`; `success` is the share of solved episodes."""
        self._equal, self._success = equal_within_groups(rewards, self._compared), success

    def end_batch(self, num_episodes: Tensor, advantages: Tensor, rl_step: int) -> None:
        """Adds what came out of the batch. Collective.

        Args:
            num_episodes: With a token in the loss.
            advantages: (B, T) of this rank.
            rl_step: From 0.
        """
        equal = self._equal
        if equal and self._by_turns:  # `equal` is the same on all ranks
            equal = not self._ranks.sum((advantages.abs() > 1e-4).sum().float())
        if self._equal_rewards.add(equal) and self._ranks.index == 0:
            warnings.warn(equal_rewards_warning(rl_step, self._success, self._name), stacklevel=2)
        if self._empty_batches.add(not num_episodes) and self._ranks.index == 0:
            warnings.warn(empty_batch_warning(rl_step), stacklevel=2)


def silent_steps(args: EPOConfig, methods: Methods, ranks: Ranks, group_size: int, *, has_critic: bool) -> SilentSteps:
    """Returns what warns in a run of these methods.

    Args:
        args: The configuration.
        methods: The first is the credit.
        ranks: The processes.
        group_size: Episodes of a task.
        has_critic: Whether the trainer has one.
    """
    if has_critic or methods.need(Need.FEATURES):  # critics compare all turns, ArCHer's those of earlier batches too
        return SilentSteps(args.generation_batch_size, "the whole batch", ranks, by_turns=True)
    credit = next(iter(methods.values()))
    return SilentSteps(group_size, "every group", ranks, by_turns=Need.TURN_REWARDS in credit.needs)
