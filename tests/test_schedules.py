"""Schedules of a weight: numbers worked out by hand, and the ends."""

import pytest

from epo_trl.objectives import scheduled_weight


def run(schedule, total, start=0.3, end=0.1):
    return [scheduled_weight(k, total, schedule=schedule, start=start, end=end) for k in range(total)]


def test_by_hand():
    assert run("constant", 3, end=None) == [0.3, 0.3, 0.3]
    assert run("linear", 5) == pytest.approx([0.3, 0.25, 0.2, 0.15, 0.1])
    root = 0.5**0.5
    halves = [0.0, (1 - root) / 2, 0.5, (1 + root) / 2, 1.0]  # (1 - cos) / 2 at quarters of pi
    assert run("cosine", 5) == pytest.approx([0.3 - 0.2 * x for x in halves])
    assert run("linear", 3, start=0.0, end=1.0) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_run_of_one_step_has_the_start_and_a_longer_run_keeps_the_end(schedule):
    assert run(schedule, 1) == [0.3]
    assert scheduled_weight(7, 4, schedule=schedule, start=0.3, end=0.0) == 0.0
