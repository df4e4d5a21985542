"""Exploded, collapsed: each definition at its edge, on series made by hand."""

import math

import pytest

from epo_trl.evaluation.outcomes import Collapse, Explosion, collapsed, exploded, left_band

NO = math.nan


def first(flags):
    return flags.index(True) if True in flags else None


@pytest.mark.parametrize(
    ("entropy", "step"),
    [
        ([1, 2, 3] + [4.01] * 9, None),  # the start is 2; nine steps above 4 are not ten
        ([1, 2, 3] + [4.01] * 10, 12),
        ([1, 2, 3] + [4.0] * 30, None),  # twice is not above twice
        ([1, 2, 3] + [4.01] * 9 + [4.0] + [4.01] * 9, None),  # not in a row
        ([1, 2, 3] + [4.01] * 5 + [NO] + [4.01] * 5, 13),  # a step without entropy is as if it had not been
        ([2, 2, 2] + [50] * 9, None),
        ([0.0] * 40, None),
    ],
)
def test_entropy_explodes_after_ten_steps_in_a_row_above_twice_the_mean_of_the_first_three(entropy, step):
    assert first(exploded(entropy, [0.1] * len(entropy))) == step


@pytest.mark.parametrize(
    ("invalid", "step"),
    [
        # The start is 0.1, so the mean of ten has to come to 0.3: their sum to 3.
        ([0.0, 0.1, 0.2] + [0.1] * 7 + [0.5] * 4, None),  # 4 * 0.5 + 6 * 0.1 = 2.6
        ([0.0, 0.1, 0.2] + [0.1] * 7 + [0.5] * 5, 14),  # 5 * 0.5 + 5 * 0.1 = 3.0
        ([0.1] * 10 + [1.0] + [0.1] * 10, None),  # one bad batch
        ([0.1] * 3 + [0.9] * 6, None),  # nine steps have no running mean yet
        ([0.1] * 3 + [0.9] * 7, 9),
        ([0.7] * 3 + [0.9] * 10, 12),  # 0.9 - 0.7 is a little more than 0.2 to a computer
        ([0.5] * 3 + [0.7] * 10, 12),  # 0.7 - 0.5 is a little less
        ([0.9] * 3 + [0.1] * 20, None),  # better
    ],
)
def test_invalid_turns_explode_when_their_running_mean_is_20_points_above_the_start(invalid, step):
    assert first(exploded([1.0] * len(invalid), invalid)) == step


def test_a_run_that_comes_back_is_not_exploded_any_more():
    flags = exploded([1.0] * 3 + [3.0] * 12 + [1.0] * 2, [0.0] * 17)
    assert [step for step, flag in enumerate(flags) if flag] == [12, 13, 14]


def test_an_explosion_says_by_what():
    watch = Explosion()
    for entropy, invalid in [(1.0, 0.0)] * 3 + [(3.0, 0.1)] * 10:
        watch.add(entropy, invalid)
    assert (watch.by_entropy, watch.by_invalid_turns) == (True, False)


# Ten steps of success 0.6, entropy 1; then success 0.2, entropy 0.1. After n such steps the running means are
# success 0.6 - 0.04 n, entropy 1 - 0.09 n: 0.4 at n = 5, below 0.3 at n = 8.
GOOD, BAD = (1.0, 0.6), (0.1, 0.2)


@pytest.mark.parametrize(
    ("later", "step"),
    [
        ([BAD] * 7, None),
        ([BAD] * 8, 17),
        ([(1.0, 0.2)] * 30, None),  # fails without losing entropy
        ([(0.1, 0.6)] * 30, None),  # settles on what works
        ([(0.1, 0.41)] * 30, None),  # 19 points below the best
        ([(0.1, 0.40)] * 30, 19),  # 20 points: once all ten steps are new
        ([(0.3, 0.2)] * 30, None),  # 0.3 of the start is not below 0.3
        ([(0.29, 0.2)] * 30, 19),
        ([(NO, 0.2)] * 30, None),
        ([BAD, (NO, 0.2)] * 8, 24),  # the eighth step with an entropy
    ],
)
def test_a_run_collapses_when_both_running_means_are_low(later, step):
    assert first(collapsed(*zip(*[GOOD] * 10 + later, strict=True))) == step


def test_success_is_compared_with_the_best_running_mean_not_with_the_start():
    """Success 0.1 at the start, 0.5 later, 0.25 in the end: above the start, 25 points below the best."""
    success = [0.1] * 10 + [0.5] * 10 + [0.25] * 10
    entropy = [1.0] * 10 + [0.1] * 20
    # Below 0.5 by 20 points once eight steps of 0.25 are in it: 0.5 - 0.025 * 8 = 0.3.
    assert first(collapsed(entropy, success)) == 27
    assert first(collapsed(entropy, [0.1] * 10 + [0.25] * 20)) is None


def test_a_lucky_batch_is_no_best():
    assert first(collapsed([1.0] * 10 + [0.1] * 40, [0.4] * 10 + [1.0] + [0.4] * 39)) is None


def test_another_best_can_be_given_and_its_own_counts_if_it_is_higher():
    entropy, success = [1.0] * 3 + [0.0] * 10, [0.5] * 13
    assert first(collapsed(entropy, success, best=0.7)) == 10
    assert first(collapsed(entropy, success, best=0.69)) is None
    watch = Collapse(best=0.2)
    for _ in range(10):
        watch.add(1.0, 0.5)
    assert watch.best == 0.5


@pytest.mark.parametrize(
    ("entropy", "step"),
    [
        ([1, 2, 3] + [2] * 4 + [3.01] * 10, 7),
        ([1, 2, 3] + [2] * 4 + [3.01] * 9, None),
        ([1, 2, 3] + [3.0, 0.6] * 10, None),  # 1.5 and 0.3 times the start are inside
        ([1, 2, 3] + [0.59] * 10, 3),
        ([1, 2, 3] + [0.59, 3.01] * 5, 3),  # outside on both sides
        ([1, 2, 3] + [0.59] * 9 + [1] + [0.59] * 10, 13),
        ([1, 2, 3] + [0.59] * 2 + [NO] + [0.59] * 8, 3),
        ([], None),
    ],
)
def test_a_curve_leaves_the_band_at_the_first_of_ten_steps_outside(entropy, step):
    assert left_band(entropy) == step


def test_curves_of_different_lengths_are_refused():
    with pytest.raises(ValueError):
        exploded([1.0] * 3, [0.1] * 2)
