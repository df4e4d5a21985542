"""Episodes as rows, with masks that can be checked by eye. Prompt tokens are 1..., response tokens 50... ."""

import pytest

from epo_trl.rollout import episode_to_row
from epo_trl.types import Episode, StopReason, Turn


def turn(prompt, response, logprobs=None):
    return Turn(tuple(prompt), tuple(response), "response", "seen", "go", True, logprobs=logprobs)


def episode(*turns, stop=StopReason.LOST):
    return Episode("train/0", "task", "type", turns, stop)


def test_an_episode_of_three_turns():
    row = episode_to_row(episode(turn([1, 2, 3], [51, 52]), turn([4, 5], [53]), turn([6], [54, 55, 56])), 99)
    assert row.prompt_ids == [1, 2, 3]
    assert row.completion_ids == [51, 52, 4, 5, 53, 6, 54, 55, 56]
    assert row.env_mask == [1, 1, 0, 0, 1, 0, 1, 1, 1]
    assert row.turn_ids == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert row.logprobs is None


def test_an_episode_of_one_turn_has_no_environment_tokens():
    row = episode_to_row(episode(turn([1, 2], [51, 52, 53])), 99)
    assert (row.prompt_ids, row.completion_ids) == ([1, 2], [51, 52, 53])
    assert (row.env_mask, row.turn_ids) == ([1, 1, 1], [0, 0, 0])


def test_a_concatenated_turn_that_appends_nothing():
    row = episode_to_row(episode(turn([1], [51]), turn([], [52])), 99)
    assert (row.completion_ids, row.env_mask, row.turn_ids) == ([51, 52], [1, 1], [0, 1])


def test_logprobs_are_zero_on_prompts():
    row = episode_to_row(episode(turn([1, 2], [51], (-1.0,)), turn([3, 4], [52, 53], (-2.0, -3.0))), 99)
    assert row.logprobs == [-1.0, 0.0, 0.0, -2.0, -3.0]


def test_logprobs_that_are_missing_in_one_turn_are_missing_in_the_row():
    assert episode_to_row(episode(turn([1], [51], (-1.0,)), turn([2], [52])), 99).logprobs is None


@pytest.mark.parametrize(
    "without_signal",
    [episode(turn([1], [51], (-1.0,)), stop=StopReason.ABORTED), episode(stop=StopReason.CONTEXT_FULL)],
)
def test_an_episode_without_signal_becomes_a_placeholder_with_an_empty_mask(without_signal):
    row = episode_to_row(without_signal, 99)
    assert (row.prompt_ids, row.completion_ids) == ([99], [99])
    assert (row.env_mask, row.turn_ids, row.logprobs) == ([0], [0], None)


@pytest.mark.parametrize("stop", [stop for stop in StopReason if stop is not StopReason.ABORTED])
def test_every_other_end_carries_signal(stop):
    assert episode_to_row(episode(turn([1], [51]), stop=stop), 99).env_mask == [1]
