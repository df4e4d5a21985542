"""DAPO: which groups are replaced, what a long response costs, and a warning about other fields."""

import math

import pytest
import torch
from trainer_kit import make_config

from epo_trl.methods import Comm, Group, Selection, StepSummary
from epo_trl.methods.dapo import DAPO
from epo_trl.types import Episode, StopReason, Turn


def episode(*lengths, reward=0.0, stop=StopReason.TURN_LIMIT):
    """Returns an episode of responses of so many tokens."""
    return Episode("train/0", "", "", tuple(Turn((1,), (2,) * n, "", "", "", True, reward) for n in lengths), stop)


@pytest.mark.parametrize(
    ("won", "returns", "usable", "by_win", "by_return"),
    [
        ((True, False), (10.0, 0.0), (True, True), True, True),
        ((True, True), (10.0, 9.9), (True, True), False, True),
        ((False, False), (0.0, 0.0), (True, True), False, False),
        ((True, False, False), (10.0, 0.0, 0.0), (False, True, True), False, False),
        ((True, False), (10.0, 0.0), (False, False), False, False),
    ],
    ids=["different", "only the penalties differ", "all lost", "the winner was aborted", "all aborted"],
)
def test_a_group_is_kept_if_outcomes_differ_among_those_that_carry_a_signal(won, returns, usable, by_win, by_return):
    group = Group(returns, won, usable)
    for method, kept in ((DAPO(10), by_win), (DAPO(10, outcome="return"), by_return)):
        assert method.select([group]) == [Selection.TRAIN if kept else Selection.REPLACE]


def test_overlong_shaping_by_hand():
    """Of 20 tokens the last 25 % count: 15 cost nothing, 17 two fifths, 20 all."""
    method = DAPO(20, overlong_share=0.25, overlong_penalty=2.0)
    rewards = method.turn_rewards(episode(15, 17, 20, reward=1.0))
    assert rewards == pytest.approx([1.0, 1.0 - 2 * 0.4, 1.0 - 2])
    assert method.turn_rewards(episode(20, stop=StopReason.ABORTED)) == [-2.0]
    other = DAPO(20)
    other.tally = method.tally
    two = Comm(sum=lambda counts: counts + torch.tensor([1.0, 2.0]), count=2)
    assert other.end_rl_step(StepSummary(math.nan, {}, two)) == {"dapo/overlong": 3 / 5}
    assert other.end_rl_step(StepSummary(math.nan, {})) == {"dapo/overlong": 0.0}


def test_fields_of_trl_that_are_not_dapos_are_told(tmp_path):
    with pytest.warns(UserWarning, match="'dapo' with epsilon_high None, where DAPO uses 0.28; loss_type grpo, where"):
        make_config(tmp_path, policy_method="dapo", loss_type="grpo")
