"""Defines when a run has exploded or collapsed, and the levels at which a study calls it solved or trapped.

The inputs are plain numbers, one per RL step. `Explosion` and `Collapse` receive them one by one, as in a trainer; the
functions receive whole curves, as in a report. Both give the same result. The thresholds are not from a paper and were
fixed before any run was examined. Non-finite values are ignored, as if the RL step did not exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

START_STEPS = 3  # RL steps averaged for the start: few, because an explosion can be over within ten
WINDOW = 10  # RL steps of a running mean or of a streak, so that no single batch decides
EXPLODED_RATIO = 2.0  # entropy over its start
COLLAPSED_RATIO = 0.3  # entropy over its start
POINTS = 0.2  # difference of shares: 20 percentage points
BAND = (0.3, 1.5)  # entropy over its start, see `left_band`
LAST_STEPS = 20  # RL steps whose mean success a study compares with the next two by default
SOLVED, TRAPPED = 0.8, 0.5  # solved above, trapped below


@dataclass
class RollingSeries:
    """The first `START_STEPS` and the latest `WINDOW` values of one metric."""

    first: list[float] = field(default_factory=list)
    latest: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        """Adds the value of an RL step."""
        if math.isfinite(value):
            self.first = [*self.first, value][:START_STEPS]
            self.latest = [*self.latest, value][-WINDOW:]

    @property
    def start(self) -> float:
        """Mean of the first `START_STEPS` values; NaN while there are fewer."""
        return fmean(self.first) if len(self.first) == START_STEPS else math.nan

    @property
    def recent(self) -> float:
        """Mean of the last `WINDOW` values; NaN while there are fewer."""
        return fmean(self.latest) if len(self.latest) == WINDOW else math.nan

    @property
    def lowest(self) -> float:
        """Minimum of the last `WINDOW` values; NaN while there are fewer."""
        return min(self.latest) if len(self.latest) == WINDOW else math.nan


@dataclass
class Explosion:
    """Detects an explosion, a policy that acts at random, by mean entropy over all tokens and invalid turns."""

    entropy: RollingSeries = field(default_factory=RollingSeries)
    invalid: RollingSeries = field(default_factory=RollingSeries)

    def add(self, entropy: float, invalid: float) -> bool:
        """Adds an RL step; returns whether the run has exploded."""
        self.entropy.add(entropy)
        self.invalid.add(invalid)
        return self.by_entropy or self.by_invalid_turns

    @property
    def by_entropy(self) -> bool:
        """Whether each of the last `WINDOW` entropies is above `EXPLODED_RATIO` times the start."""
        return self.entropy.lowest > EXPLODED_RATIO * self.entropy.start

    @property
    def by_invalid_turns(self) -> bool:
        """Whether the running mean is at least `POINTS` above the start."""
        return _at_least(self.invalid.recent - self.invalid.start, POINTS)


@dataclass
class Collapse:
    """Detects a collapse: the policy is almost deterministic, and its success has dropped.

    Entropy is the mean over the tokens where the reference policy had a choice, or over all tokens without a frozen
    reference; not over those above a threshold, whose mean cannot fall below it. `best` is the best success before.
    """

    entropy: RollingSeries = field(default_factory=RollingSeries)
    success: RollingSeries = field(default_factory=RollingSeries)
    best: float = 0.0

    def add(self, entropy: float, success: float) -> bool:
        """Adds an RL step; returns whether the run has collapsed.

        That is the case if the running mean of entropy is below `COLLAPSED_RATIO` times its start, and the running mean
        of success is at least `POINTS` below its best value.
        """
        self.entropy.add(entropy)
        self.success.add(success)
        self.best = max(self.best, self.success.recent)  # max keeps its first argument if the second is NaN
        low = self.entropy.recent < COLLAPSED_RATIO * self.entropy.start
        return low and _at_least(self.best - self.success.recent, POINTS)


def exploded(entropy: Iterable[float], invalid: Iterable[float]) -> list[bool]:
    """Returns for each RL step whether the run has exploded by then. The inputs have equal length; see `Explosion`."""
    watch = Explosion()
    return [watch.add(*values) for values in zip(entropy, invalid, strict=True)]


def collapsed(entropy: Iterable[float], success: Iterable[float], best: float = 0.0) -> list[bool]:
    """Returns for each RL step whether the run has collapsed by then. The inputs have equal length; see `Collapse`."""
    watch = Collapse(best=best)
    return [watch.add(*values) for values in zip(entropy, success, strict=True)]


def left_band(entropy: Sequence[float]) -> int | None:
    """Returns the RL step, from 0, at which a curve first leaves `BAND` times its start, or `None`.

    That is the first of `WINDOW` consecutive steps outside the band, above or below.
    """
    series, outside = RollingSeries(), list[int]()
    for step, value in enumerate(entropy):
        if not math.isfinite(value):
            continue
        series.add(value)
        low, high = (ratio * series.start for ratio in BAND)
        outside = [*outside, step] if value < low or value > high else []
        if len(outside) == WINDOW:
            return outside[0]
    return None


def _at_least(difference: float, points: float) -> bool:
    """Compares up to rounding, so that 0.9 - 0.7 and 0.7 - 0.5 give the same answer."""
    return difference >= points - 1e-9
