"""95 % confidence interval of a success rate."""

from __future__ import annotations

import math
from statistics import NormalDist

from epo_trl.errors import InputError


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Computes the bounds of the 95 % Wilson score interval of a rate, both within [0, 1].

        centre = (p + z^2 / 2n) / (1 + z^2 / n),   half-width = z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2)

    with p = successes / n and z the two-sided normal quantile (E. B. Wilson, JASA 22, 1927). Unlike p +- z * sqrt(...)
    it has a positive width at p = 0 and p = 1, and it keeps its coverage at n = 10.

    Args:
        successes: Number of successes, 0 to n.
        n: Number of trials; for 0 the interval is (0.0, 1.0).
    """
    if not 0 <= successes <= n:
        raise InputError(f"successes: expected a number from 0 to n, got {successes} of n = {n}")
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.975)
    rate, shrink = successes / n, 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / shrink
    half_width = z / shrink * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # at p = 0 and p = 1 one bound is exactly 0 or 1; rounding would leave 1e-17
    low = 0.0 if successes == 0 else centre - half_width
    high = 1.0 if successes == n else centre + half_width
    return low, high
