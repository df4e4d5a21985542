"""Anchor groups: the turns of a task's episodes in which the agent was in the same state (GiGPO, arXiv 2505.10978)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev
from typing import Annotated, Any

from epo_trl.bounds import Count, NonNegative, OneOf
from epo_trl.errors import InputError
from epo_trl.methods.base import Batch, Credit, Method, Need
from epo_trl.methods.grpo import GRPO
from epo_trl.methods.token_statistics import gather_by_key, rows_on_tokens
from epo_trl.objectives.gae import rewards_to_go
from epo_trl.types import Episode

State = tuple[str, ...]
Key = tuple[int, State]  # group and state
ROUNDING = 1e-6  # relative: rewards are float32, and returns are sums of them


@dataclass
class Anchored(Method):
    """Base class of credits that compare the turns of one group, on all ranks, that start from the same state.

    Args:
        anchor: What two turns must share. "observation": the text that the agent saw. "state": the state of the
            environment, which it gives as `info["state_key"]`; the agent does not see it.
        anchor_turns: Number of consecutive observations or states, up to this turn's, that must be equal.
    """

    needs = {Need.GROUPS, Need.TURN_REWARDS}

    anchor: Annotated[str, OneOf(("observation", "state"))] = "observation"
    anchor_turns: Count = 1

    def credit(self, batch: Batch) -> Credit:
        return Credit(rows_on_tokens(self.turn_advantages(batch), batch))

    def turn_advantages(self, batch: Batch) -> list[list[float]]:
        """Returns the advantage of each turn of this rank's episodes; none for an episode without a signal."""
        raise NotImplementedError

    def states(self, episode: Episode, turns: int | None = None) -> list[State]:
        """Returns the states before each turn and after the last one: the last `turns` observations or keys."""
        seen = [turn.observation for turn in episode.turns] + [episode.final_observation]
        if self.anchor == "state":
            seen = [turn.state_key for turn in episode.turns] + [episode.final_info.get("state_key", "")]
            if not all(seen):
                raise InputError(
                    "anchor: expected 'observation', got 'state', and the environment of task "
                    f"{episode.task_id!r} gives no info['state_key']"
                )
        count = self.anchor_turns if turns is None else turns
        return [tuple(seen[max(0, k - count + 1) : k + 1]) for k in range(len(seen))]

    def keyed_returns(self, batch: Batch, gamma: float, turns: int | None = None) -> list[list[tuple[Key, float]]]:
        """Returns, for each row, the key of each turn and the discounted reward from it on; none without a signal."""
        returns = rewards_to_go(batch.turn_rewards.double(), gamma).tolist()
        return [
            [((group, state), row[k]) for k, state in enumerate(self.states(episode, turns)[:-1])]
            if episode.is_usable
            else []
            for group, episode, row in zip(batch.group_ids.tolist(), batch.episodes, returns, strict=True)
        ]


@dataclass
class EpisodeAndTurn(Anchored):
    """Base class of credits that add the advantages of turns, times `step_weight`, to GRPO's of the episode."""

    step_weight: NonNegative = 1.0

    def credit(self, batch: Batch) -> Credit:
        return Credit(GRPO().credit(batch).advantages + self.step_weight * super().credit(batch).advantages)


def sample_deviation(values: list[float]) -> float:
    """Returns the deviation of a sample (n - 1), above 0."""
    return stdev(values) + 1e-6


def population_deviation(values: list[float]) -> float:
    """Returns the deviation of a population (n), above 0."""
    return pstdev(values) + 1e-6


def largest_reward_sum(batch: Batch) -> float:
    """Returns the largest sum of absolute rewards of an episode on any rank: rounding is relative to it. Collective."""
    return max(batch.ranks.gather(batch.turn_rewards.double().abs().sum(1).tolist()))


def compare_by_key(
    rows: Sequence[Sequence[tuple[Any, float]]],
    batch: Batch,
    *,
    divisor: Callable[[list[float]], float] | None,
    size: float | None = None,
) -> list[list[float]]:
    """Returns each value minus the mean of those with its key on all ranks, divided by what `divisor` gives for them.

    It is 0 if the value is alone, or if the values differ by rounding only. Collective.

    Args:
        rows: Rows of (key, value), those of this rank.
        batch: The batch they belong to.
        divisor: Function of at least two different values; `None` for 1.
        size: Magnitude of the numbers that the values are differences or sums of; `None` for that of the values.
    """

    def spread(values: list[float]) -> tuple[float, float]:
        magnitude = max(map(abs, values)) if size is None else size
        if len(values) < 2 or max(values) - min(values) <= ROUNDING * magnitude:
            return values[0], math.inf
        return fmean(values), divisor(values) if divisor else 1.0

    groups = {key: spread(values) for key, values in gather_by_key(rows, batch).items()}
    return [[(value - groups[key][0]) / groups[key][1] for key, value in row] for row in rows]
