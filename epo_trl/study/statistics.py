"""Statistics for a few seeds, as pure functions of plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

MOST_PAIRS = 100_000  # a larger number of pairs is reported as infinite
MANY = 200  # degrees of freedom above which a series is exact to seven digits


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds.

    Args:
        mean: Mean over seeds.
        deviation: Standard deviation between seeds (n - 1); NaN for one seed.
        low: Lower end of the confidence interval of the mean; NaN for one seed.
        high: Upper end of the confidence interval.
        count: Number of seeds.
    """

    mean: float
    deviation: float
    low: float
    high: float
    count: int


def estimate(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Computes mean, deviation and Student's t interval of the mean.

        mean +- t * deviation / sqrt(n),   t the two-sided quantile with n - 1 degrees of freedom

    The coverage holds for roughly normal values. Seeds that either solve a task or do not are far from that: count them
    instead.

    Args:
        values: One value per seed, at least one.
        confidence: Coverage, strictly between 0 and 1.
    """
    if not values:
        raise ValueError("values: expected at least one, got none")
    count, mean = len(values), fmean(values)
    if count == 1:
        return Estimate(mean, math.nan, math.nan, math.nan, 1)
    deviation = stdev(values)
    half = t_quantile((1 + confidence) / 2, count - 1) * deviation / math.sqrt(count)
    return Estimate(mean, deviation, mean - half, mean + half, count)


def paired(values: Mapping[int, float], baseline: Mapping[int, float], confidence: float = 0.95) -> Estimate | None:
    """Estimates `values - baseline` over the seeds that both have; `None` if there are none.

    Args:
        values: Values by seed.
        baseline: Values of the baseline by seed.
        confidence: Coverage, see `estimate`.
    """
    shared = [seed for seed in values if seed in baseline]
    return estimate([values[seed] - baseline[seed] for seed in shared], confidence) if shared else None


def pairs_needed(deviation: float, difference: float, power: float = 0.8, confidence: float = 0.95) -> float:
    """Computes the number of pairs with which a t test detects a difference; `inf` above `MOST_PAIRS`.

    The smallest n with n >= ((t_a + t_b) * deviation / difference)^2, where t_a and t_b are the quantiles at
    (1 + confidence) / 2 and at `power` with n - 1 degrees of freedom; at least 2. The usual approximation, about one
    pair off at worst.

    Args:
        deviation: Standard deviation of the paired differences.
        difference: Difference to detect.
        power: Probability of detecting it.
        confidence: 1 minus the significance level of the test.
    """
    if difference == 0 or not math.isfinite(deviation):
        return math.inf
    ratio, normal = (deviation / difference) ** 2, NormalDist()
    count = ratio * (normal.inv_cdf((1 + confidence) / 2) + normal.inv_cdf(power)) ** 2  # almost always too few
    if count > MOST_PAIRS:
        return math.inf
    count = max(2, math.ceil(count))
    while count < ratio * _quantiles(count - 1, power, confidence):
        count += 1
    return count


def _quantiles(freedom: int, power: float, confidence: float) -> float:
    return (t_quantile((1 + confidence) / 2, freedom) + t_quantile(power, freedom)) ** 2


def t_quantile(share: float, freedom: int) -> float:
    """Computes the quantile of Student's t distribution.

    Args:
        share: Probability below the quantile, strictly between 0 and 1.
        freedom: Degrees of freedom, an integer >= 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"share: expected a number strictly between 0 and 1, got {share}")
    if share < 0.5:
        return -t_quantile(1 - share, freedom)
    if freedom > MANY:  # Abramowitz and Stegun 26.7.5
        z = NormalDist().inv_cdf(share)
        return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    inside = 2 * share - 1  # probability of (-t, t)
    low, high = 0.0, math.pi / 2  # bounds of the angle whose tangent is t / sqrt(freedom)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_inside(middle, freedom) < inside else (low, middle)
    return math.tan(high) * math.sqrt(freedom)


def _t_inside(angle: float, freedom: int) -> float:
    """Computes the probability that |t| < tan(angle) * sqrt(freedom): Abramowitz and Stegun 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(odd, freedom - 1, 2):  # powers of the cosine, up to freedom - 2
        total += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def fisher_exact(wins: int, count: int, other_wins: int, other_count: int) -> float:
    """Computes the two-sided p-value of Fisher's exact test of two shares.

    Sums, given all four margins, the probabilities of the tables that are not likelier than the observed one.

    Args:
        wins: Successes of the first sample.
        count: Trials of the first sample.
        other_wins: Successes of the second sample.
        other_count: Trials of the second sample.
    """
    if not (0 <= wins <= count and 0 <= other_wins <= other_count):
        raise ValueError(f"wins: expected at most all trials, got {wins} of {count} and {other_wins} of {other_count}")
    both = wins + other_wins
    tables = {
        first: math.comb(count, first) * math.comb(other_count, both - first)
        for first in range(max(0, both - other_count), min(count, both) + 1)
    }
    return sum(ways for ways in tables.values() if ways <= tables[wins]) / sum(tables.values())


def first_above(values: Sequence[float | None], level: float, window: int) -> int | None:
    """Returns the index at which the running mean over `window` values first reaches the level, or `None`.

    Args:
        values: One value per RL step; `None` entries are skipped.
        level: Level to reach.
        window: Number of values in the running mean; the first `window - 1` values have none.
    """
    seen = [(index, value) for index, value in enumerate(values) if value is not None]
    for last in range(window, len(seen) + 1):
        if fmean(value for _, value in seen[last - window : last]) >= level - 1e-12:
            return seen[last - 1][0]
    return None
