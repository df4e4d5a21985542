"""Intervals, differences and counts over seeds, against numbers of tables and worked out by hand."""

import math
from statistics import NormalDist

import pytest

from epo_trl.study.statistics import (
    estimate,
    first_above,
    fisher_exact,
    paired,
    pairs_needed,
    t_quantile,
)


@pytest.mark.parametrize(  # from a printed table
    ("freedom", "quantiles"),
    [
        (1, (12.706, 1.376)), (2, (4.303, 1.061)), (3, (3.182, 0.978)), (4, (2.776, 0.941)), (5, (2.571, 0.920)),
        (9, (2.262, 0.883)), (10, (2.228, 0.879)), (29, (2.045, 0.854)), (30, (2.042, 0.854)), (100, (1.984, 0.845)),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_the_table(freedom, quantiles):
    assert (round(t_quantile(0.975, freedom), 3), round(t_quantile(0.8, freedom), 3)) == quantiles
    assert t_quantile(0.025, freedom) == -t_quantile(0.975, freedom)


def test_quantiles_in_closed_form():
    for share in (0.6, 0.9, 0.995):
        assert t_quantile(share, 1) == pytest.approx(math.tan(math.pi * (share - 0.5)))  # Cauchy
        x = 2 * share - 1
        assert t_quantile(share, 2) == pytest.approx(x * math.sqrt(2 / (1 - x * x)))
    assert t_quantile(0.975, 100_000) == pytest.approx(NormalDist().inv_cdf(0.975), rel=1e-4)
    assert t_quantile(0.975, 200) == pytest.approx(t_quantile(0.975, 201), abs=6.1e-5)  # (z^3 + z) / (4 * 200^2)
    assert t_quantile(0.975, 200) > t_quantile(0.975, 201)
    assert t_quantile(0.5, 7) == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="share: .*got 1"):
        t_quantile(1, 3)


def test_mean_deviation_and_interval_by_hand():
    # 2, 4, 9: mean 5, squares of deviations 9 + 1 + 16 = 26, deviation sqrt(13); t of 2 degrees is 4.30265
    found = estimate([2, 4, 9])
    half = 4.302653 * math.sqrt(13) / math.sqrt(3)
    assert (found.mean, found.count) == (5, 3) and found.deviation == pytest.approx(math.sqrt(13))
    assert (found.low, found.high) == (pytest.approx(5 - half, abs=1e-5), pytest.approx(5 + half, abs=1e-5))
    one = estimate([0.3])
    assert one.mean == 0.3 and one.count == 1 and all(map(math.isnan, (one.deviation, one.low, one.high)))
    with pytest.raises(ValueError, match="values: .*got none"):
        estimate([])


def test_differences_are_taken_over_shared_seeds():
    assert paired({0: 1.0, 1: 4.0, 7: 100.0}, {1: 1.0, 0: 0.0, 9: 50.0}) == estimate([1.0, 3.0])
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_a_pair_of_arms_with_the_same_noise_differs_exactly():
    noise = {seed: math.sin(seed) for seed in range(5)}
    found = paired({seed: value + 0.5 for seed, value in noise.items()}, noise)
    assert found.mean == pytest.approx(0.5) and found.deviation == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("deviation", "difference", "pairs"),
    # 5 pairs: (2.776 + 0.941) * 0.68 = 2.53, squared 6.4; 6 pairs: (2.571 + 0.920) * 0.68 = 2.37, squared 5.6
    [(3.4, 5, 6), (3.4, -5, 6), (2.8, 5, 5), (2.6, 5, 5), (5.6, 5, 12), (2.8, 3, 9), (2.6, 3, 8), (5.6, 3, 30)],
)
def test_pairs_that_are_needed_by_hand(deviation, difference, pairs):
    assert pairs_needed(deviation, difference) == pairs


def test_pairs_at_the_ends():
    assert pairs_needed(0.0, 1.0) == 2
    assert pairs_needed(1.0, 0.0) == pairs_needed(math.nan, 1.0) == pairs_needed(1.0, 1e-9) == math.inf
    large = pairs_needed(10.0, 1.0)  # about (1.96 + 0.842)^2 * 100 = 785
    assert 780 <= large <= 800


@pytest.mark.parametrize(
    ("table", "p"),
    [
        ((3, 4, 1, 4), 34 / 70),  # the lady tasting tea: (1 + 16 + 16 + 1) / 70
        ((4, 4, 0, 4), 2 / 70),
        ((2, 4, 2, 4), 1.0),
        ((0, 3, 2, 3), 0.4),  # 2 of 6 won: 3, 9, 3 of 15 ways; (3 + 3) / 15
        ((6, 7, 4, 7), 0.5594),  # 10 of 14 won: 35, 245, 441, 245, 35 of 1001 ways; 560 / 1001
        ((0, 5, 0, 9), 1.0),
        ((0, 0, 3, 5), 1.0),
    ],
)
def test_the_exact_test_by_hand(table, p):
    wins, count, other_wins, other_count = table
    assert fisher_exact(*table) == pytest.approx(p, abs=5e-5)
    assert fisher_exact(other_wins, other_count, wins, count) == fisher_exact(*table)
    assert fisher_exact(count - wins, count, other_count - other_wins, other_count) == fisher_exact(*table)


def test_the_first_step_of_a_running_mean_above_a_level():
    values = [0.0, 1.0, 0.7, 0.9, 0.8, 1.0]
    assert first_above(values, 0.8, 1) == 1
    assert first_above(values, 0.8, 2) == 2  # 0.85
    assert first_above(values, 0.8, 3) == 3  # 2.6 / 3
    assert first_above(values, 0.95, 2) is None
    assert first_above(values, 0.8, 7) is None
    assert first_above([None, 0.8, None, 0.8], 0.8, 2) == 3
    assert first_above([0.8] * 10, 0.8, 10) == 9  # rounding
