"""Selects the episodes of a batch that are stored for inspection."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from epo_trl.types import Episode
from epo_trl.watch.sample import Sample, sample_of


class Outcome(NamedTuple):
    """The data of an episode that selection depends on.

    Args:
        reward: Total reward of the episode.
        usable: Whether the episode is usable, see `Episode.is_usable`.
        group: Number of the episode's group; members of a group play the same task.
    """

    reward: float
    usable: bool
    group: int = 0


def choose(outcomes: Sequence[Outcome], count: int, draw: random.Random) -> dict[int, str]:
    """Selects at most `count` episodes; returns their indices with the reason for each.

    The order is: the worst and the best by reward if they differ, then an aborted one, then random ones. Ties for the
    worst are broken in favour of the best episode's group, so the two can be compared turn by turn.
    """
    usable = [i for i, outcome in enumerate(outcomes) if outcome.usable]
    chosen: dict[int, str] = {}
    if usable:
        best = max(usable, key=lambda i: outcomes[i].reward)
        worst = min(usable, key=lambda i: (outcomes[i].reward, outcomes[i].group != outcomes[best].group))
        if outcomes[worst].reward < outcomes[best].reward:
            chosen |= {worst: "worst", best: "best"}
    aborted = [i for i, outcome in enumerate(outcomes) if not outcome.usable]
    chosen |= dict.fromkeys(aborted[:1], "aborted")
    others = [i for i in range(len(outcomes)) if i not in chosen]
    chosen |= dict.fromkeys(draw.sample(others, len(others)), "random")
    return dict(list(chosen.items())[:count])


def choose_samples(episodes: Sequence[Episode], count: int, draw: random.Random, *, split: str) -> list[Sample]:
    """Selects at most `count` episodes of an evaluation with `choose`."""
    outcomes = [Outcome(episode.total_reward, episode.is_usable) for episode in episodes]
    return [sample_of(episodes[i], split=split, why=why) for i, why in choose(outcomes, count, draw).items()]
