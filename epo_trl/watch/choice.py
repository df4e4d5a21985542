"""Which episodes of a batch are kept for people to look at."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from epo_trl.types import Episode
from epo_trl.watch.sample import Sample, sample_of


class Outcome(NamedTuple):
    """What the choice looks at.

    Args:
        reward: Total of the episode.
        usable: Whether it was played to an end, see `Episode.is_usable`.
        group: Number of its group; members of a group play the same task.
    """

    reward: float
    usable: bool
    group: int = 0


def choose(outcomes: Sequence[Outcome], count: int, draw: random.Random) -> dict[int, str]:
    """Returns the indices of at most `count` episodes, and why each was chosen.

    First the worst and the best by reward, if there is a difference, then one that was aborted; the rest is drawn. Of
    equally bad ones, that of the group of the best is taken: the two can be compared turn by turn.

    Args:
        outcomes: Outcomes of all episodes in the batch.
        count: At least 0.
        draw: Draws the others.
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


def samples_of(episodes: Sequence[Episode], count: int, draw: random.Random, *, split: str) -> list[Sample]:
    """Returns at most `count` of the episodes of an evaluation, chosen like that.

    Args:
        episodes: All that were played.
        count: At least 0.
        draw: Draws those that are neither the worst nor the best.
        split: Name of the list.
    """
    outcomes = [Outcome(episode.total_reward, episode.is_usable) for episode in episodes]
    return [sample_of(episodes[i], split=split, why=why) for i, why in choose(outcomes, count, draw).items()]
