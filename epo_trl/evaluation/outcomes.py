"""What it means that a run has exploded, collapsed, solved its tasks or is trapped.

All of it is asked of plain numbers, one per RL step: `Explosion` and `Collapse` take them one by one, as a trainer has
them, and the functions take whole curves, as a report reads them. Both say the same. The thresholds were chosen before
any run was looked at; no paper has them. A value that is not finite is left out, as if the RL step had not been.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

START_STEPS = 3  # RL steps whose mean is the start: few, because an explosion can be over within ten
WINDOW = 10  # RL steps of a running mean, and of "in a row": no single batch decides
EXPLODED_RATIO = 2.0  # of entropy to its start
COLLAPSED_RATIO = 0.3  # of entropy to its start
POINTS = 0.2  # of a share: 20 percentage points
BAND = (0.3, 1.5)  # of entropy to its start, see `left_band`
LAST_STEPS = 20  # RL steps whose success decides between solved and trapped
SOLVED, TRAPPED = 0.8, 0.5  # success above, success below


@dataclass
class Course:
    """The start of one quantity, and its latest values.

    Args:
        first: The first values, up to `START_STEPS`.
        latest: The last values, up to `WINDOW`.
    """

    first: list[float] = field(default_factory=list)
    latest: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        """Adds the value of an RL step."""
        if math.isfinite(value):
            self.first = [*self.first, value][:START_STEPS]
            self.latest = [*self.latest, value][-WINDOW:]

    @property
    def start(self) -> float:
        """Mean of the first values, NaN until there are enough."""
        return fmean(self.first) if len(self.first) == START_STEPS else math.nan

    @property
    def recent(self) -> float:
        """Mean of the latest values, NaN until there are enough."""
        return fmean(self.latest) if len(self.latest) == WINDOW else math.nan

    @property
    def lowest(self) -> float:
        """Lowest of the latest values, NaN until there are enough."""
        return min(self.latest) if len(self.latest) == WINDOW else math.nan


@dataclass
class Explosion:
    """Tells whether a run has exploded: it acts at random.

    Args:
        entropy: Mean entropy over all tokens, in nats.
        invalid: Share of invalid turns.
    """

    entropy: Course = field(default_factory=Course)
    invalid: Course = field(default_factory=Course)

    def add(self, entropy: float, invalid: float) -> bool:
        """Adds an RL step; returns whether the run has exploded by now."""
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
    """Tells whether a run has collapsed: it is almost deterministic, and does the wrong thing.

    Args:
        entropy: Mean entropy in nats: of the tokens where the first policy had a choice, if a frozen reference tells
            them, otherwise of all. Not of tokens above a threshold of entropy: their mean cannot fall below it.
        success: Share of solved episodes.
        best: The success to compare with, at least; for example that of the best run of a study.
    """

    entropy: Course = field(default_factory=Course)
    success: Course = field(default_factory=Course)
    best: float = 0.0

    def add(self, entropy: float, success: float) -> bool:
        """Adds an RL step; returns whether the run has collapsed by now.

        It has if the running mean of the entropy is below `COLLAPSED_RATIO` of the start, and that of success at least
        `POINTS` below the best that it has been.
        """
        self.entropy.add(entropy)
        self.success.add(success)
        self.best = max(self.best, self.success.recent)  # in this order: NaN is not above anything
        low = self.entropy.recent < COLLAPSED_RATIO * self.entropy.start
        return low and _at_least(self.best - self.success.recent, POINTS)


def exploded(entropy: Iterable[float], invalid: Iterable[float]) -> list[bool]:
    """Returns for each RL step whether the run has exploded by then, see `Explosion`; both have the same length."""
    watch = Explosion()
    return [watch.add(*values) for values in zip(entropy, invalid, strict=True)]


def collapsed(entropy: Iterable[float], success: Iterable[float], best: float = 0.0) -> list[bool]:
    """Returns for each RL step whether the run has collapsed by then, see `Collapse`; both have the same length."""
    watch = Collapse(best=best)
    return [watch.add(*values) for values in zip(entropy, success, strict=True)]


def left_band(entropy: Sequence[float]) -> int | None:
    """Returns the RL step, from 0, at which a curve first leaves `BAND` times its start, or `None`.

    It is the first of `WINDOW` steps in a row that lie outside, above or below. Asked of each third of the episode it
    tells in which order over the turns entropy goes.
    """
    course, outside = Course(), list[int]()
    for step, value in enumerate(entropy):
        if not math.isfinite(value):
            continue
        course.add(value)
        low, high = (ratio * course.start for ratio in BAND)
        outside = [*outside, step] if value < low or value > high else []
        if len(outside) == WINDOW:
            return outside[0]
    return None


def solved(success: Sequence[float]) -> bool:
    """Returns whether the mean success of the last `LAST_STEPS` RL steps is above `SOLVED`."""
    return _final(success) > SOLVED


def trapped(success: Sequence[float]) -> bool:
    """Returns whether the mean success of the last `LAST_STEPS` RL steps is below `TRAPPED`."""
    return _final(success) < TRAPPED


def _final(success: Sequence[float]) -> float:
    seen = [value for value in success if math.isfinite(value)]
    if len(seen) < LAST_STEPS:
        raise ValueError(f"success: expected at least {LAST_STEPS} RL steps with a finite value, got {len(seen)}")
    return fmean(seen[-LAST_STEPS:])


def _at_least(difference: float, points: float) -> bool:
    """Returns whether it is, up to rounding: 0.9 - 0.7 and 0.7 - 0.5 are the same here."""
    return difference >= points - 1e-9
