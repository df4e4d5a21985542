"""Intervals, differences and counts over seeds, against numbers of tables and worked out by hand."""

import math

import pandas as pd
import pytest

from epo_trl.lab.study.statistics import estimate, first_above, pairs_needed


def test_mean_deviation_and_interval_by_hand():
    # 2, 4, 9: mean 5, squares of deviations 9 + 1 + 16 = 26, deviation sqrt(13); t of 2 degrees is 4.30265
    found = estimate([2, 4, 9])
    half = 4.302653 * math.sqrt(13) / math.sqrt(3)
    assert (found.mean, found.count) == (5, 3) and found.deviation == pytest.approx(math.sqrt(13))
    assert (found.low, found.high) == (pytest.approx(5 - half, abs=1e-5), pytest.approx(5 + half, abs=1e-5))
    one = estimate([0.3])
    assert one.mean == 0.3 and one.count == 1 and all(map(math.isnan, (one.deviation, one.low, one.high)))
    assert estimate([]) is None and estimate([math.nan]) is None
    assert estimate([2, math.nan, 4, 9]) == found


@pytest.mark.parametrize(
    ("deviation", "difference", "pairs"),
    # 5 pairs: (2.776 + 0.941) * 0.68 = 2.53, squared 6.4; 6 pairs: (2.571 + 0.920) * 0.68 = 2.37, squared 5.6
    [(3.4, 5, 6), (3.4, -5, 6), (2.8, 5, 5), (2.6, 5, 5), (5.6, 5, 12), (2.8, 3, 9), (2.6, 3, 8), (5.6, 3, 30)],
)
def test_pairs_that_are_needed_by_hand(deviation, difference, pairs):
    assert pairs_needed(deviation, difference) == pairs
    assert pairs_needed(0.0, 1.0) == 2 and 780 <= pairs_needed(10.0, 1.0) <= 800  # (1.96 + 0.842)^2 * 100 = 785
    assert pairs_needed(1.0, 0.0) == pairs_needed(math.nan, 1.0) == pairs_needed(1.0, 1e-9) == math.inf


def test_the_first_step_of_a_running_mean_above_a_level():
    values = pd.Series([0.0, 1.0, 0.7, 0.9, 0.8, 1.0], index=[5, 6, 7, 8, 9, 10])
    assert first_above(values, 0.8, 1) == 6
    assert first_above(values, 0.8, 2) == 7  # 0.85
    assert first_above(values, 0.8, 3) == 8  # 2.6 / 3
    assert math.isnan(first_above(values, 0.95, 2))
    assert math.isnan(first_above(values, 0.8, 7))
    assert first_above(pd.Series([0.8, 0.8], index=[1, 3]), 0.8, 2) == 3
    assert first_above(pd.Series([0.8] * 10), 0.8, 10) == 9  # rounding
