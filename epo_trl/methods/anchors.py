"""Anchor groups: the turns of a task's episodes in which the agent was in the same state (GiGPO, arXiv 2505.10978)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev
from typing import Annotated, Any, ClassVar

import torch

from epo_trl.bounds import Count, OneOf
from epo_trl.errors import InputError
from epo_trl.methods.base import Batch, Credit, Method, Need
from epo_trl.methods.token_statistics import on_tokens
from epo_trl.objectives.gae import rewards_to_go
from epo_trl.types import Episode

State = tuple[str, ...]
ROUNDING = 1e-6  # relative: rewards are float32, and returns are sums of them


@dataclass
class Anchored(Method):
    """Base class of credits that compare the turns of one group, on all ranks, that start from the same state.

    Args:
        anchor: What two turns must share. "observation": the text that the agent saw. "state": the state of the
            environment, which it gives as `info["state_key"]`; the agent does not see it.
        anchor_turns: Number of consecutive observations or states, up to this turn's, that must be equal. An episode's
            first turns compare all that they have.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.GROUPS, Need.TURN_REWARDS})

    anchor: Annotated[str, OneOf(("observation", "state"))] = "observation"
    anchor_turns: Count = 1

    def credit(self, batch: Batch) -> Credit:
        """Returns one advantage per turn."""
        per_turn = torch.zeros_like(batch.turn_rewards)
        for i, values in enumerate(self.turn_advantages(batch)):
            per_turn[i, : len(values)] = torch.tensor(values)
        return Credit(on_tokens(per_turn, batch) * batch.mask)

    def turn_advantages(self, batch: Batch) -> list[list[float]]:
        """Returns the advantage of each turn of this rank's episodes; none for an episode without a signal."""
        raise NotImplementedError

    def states(self, episode: Episode, turns: int | None = None) -> list[State]:
        """Returns the states before each turn and after the last one: the last `turns` observations or keys.

        Raises:
            ValueError: If the environment gives no key.
        """
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


def usable_rows(batch: Batch) -> list[tuple[int, int, Episode]]:
    """Returns the row, group and episode of this rank's episodes with a signal."""
    groups = batch.group_ids.tolist()
    return [(i, groups[i], episode) for i, episode in enumerate(batch.episodes) if episode.is_usable]


def discounted_returns(batch: Batch, gamma: float) -> list[list[float]]:
    """Returns the discounted reward from each turn on, for each row of the batch."""
    rows: list[list[float]] = rewards_to_go(batch.turn_rewards.double(), gamma).tolist()
    return rows


def gather_by_key(pairs: Sequence[tuple[Any, float]], batch: Batch) -> dict[Any, list[float]]:
    """Collects values by key over all ranks. Collective."""
    gathered: dict[Any, list[float]] = defaultdict(list)
    for key, value in batch.ranks.gather(list(pairs)):
        gathered[key].append(value)
    return gathered


def relative(
    value: float, others: Sequence[float], *, scale: bool, sample: bool = True, size: float | None = None
) -> float:
    """Returns a value minus the mean of its group, divided by its deviation if `scale`.

    It is 0 if the value is alone, or if the group differs by rounding only.

    Args:
        value: A value of the group.
        others: All values of the group, this one included.
        scale: Whether to divide.
        sample: Whether the deviation is that of a sample (n - 1) or of a population (n).
        size: Magnitude of the numbers that the values are differences of; `None` if they are no differences.
    """
    size = max(map(abs, others)) if size is None else size
    if len(others) < 2 or max(others) - min(others) <= ROUNDING * size:
        return 0.0
    deviation = (stdev(others) if sample else pstdev(others)) + 1e-6 if scale else 1.0
    return (value - fmean(others)) / deviation
