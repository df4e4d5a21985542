"""Statistics for a few seeds, on scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import pandas as pd
from scipy import stats

MOST_PAIRS = 100_000  # a larger number of pairs is reported as infinite
CONFIDENCE, POWER = 0.95, 0.8
ROUNDING = 1e-9  # a mean as close to a level is equal to it


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, with its 95 % confidence interval. All but mean and count are NaN for one seed."""

    mean: float
    deviation: float  # standard deviation between seeds (n - 1)
    low: float
    high: float
    count: int


def estimate(values: Sequence[float] | pd.Series) -> Estimate | None:
    """Computes mean, deviation and Student's t interval of the mean; `None` without a value.

        mean +- t * deviation / sqrt(n),   t the two-sided quantile with n - 1 degrees of freedom

    The coverage holds for roughly normal values. Seeds that either solve a task or do not are far from that: count them
    instead. A seed with NaN is left out.
    """
    known = [float(value) for value in values if not math.isnan(value)]
    if len(known) < 2:
        return Estimate(known[0], math.nan, math.nan, math.nan, 1) if known else None
    mean, deviation = fmean(known), stdev(known)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(known) - 1) * deviation / math.sqrt(len(known))
    return Estimate(mean, deviation, mean - half, mean + half, len(known))


def pairs_needed(deviation: float, difference: float) -> float:
    """Computes the number of pairs with which a t test has a power of 0.8; `inf` above `MOST_PAIRS`.

    The smallest n with n >= ((t_a + t_b) * deviation / difference)^2, where t_a and t_b are the quantiles at 0.975 and
    at 0.8 with n - 1 degrees of freedom; at least 2. The usual approximation, about one pair off at worst. `deviation`
    is the standard deviation of the paired differences.
    """
    if difference == 0 or not math.isfinite(deviation):
        return math.inf
    ratio, quantiles = deviation / difference, ((1 + CONFIDENCE) / 2, POWER)
    pairs = max(2, int((sum(stats.norm.ppf(quantiles)) * ratio) ** 2))  # a lower bound
    while pairs <= MOST_PAIRS and pairs < (sum(stats.t.ppf(quantiles, pairs - 1)) * ratio) ** 2:
        pairs += 1
    return float(pairs) if pairs <= MOST_PAIRS else math.inf


def first_above(values: pd.Series, level: float, window: int) -> float:
    """Returns the RL step at which the running mean over `window` values first reaches the level; NaN if it never does.

    The first `window - 1` values, which are by RL step and without gaps, have no running mean.
    """
    means = values.rolling(window).mean()
    reached = means.index[means >= level - ROUNDING]
    return float(reached[0]) if len(reached) else math.nan
