"""DAPO: which groups are refused, what a long response costs, the batch that is trained, a checkpoint inside it."""

import math

import pytest
import torch
from run_kit import assert_bit_equal, logged, resumable, weights
from trainer_kit import ROWS, make_config, settle_by_task

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


def watched(folder, **changes):
    """Returns a trainer whose games end as `settle_by_task` says, and the batches that it collects."""
    trainer = resumable(folder, policy_method="dapo", **changes)
    play, collect, batches = trainer.play, trainer._collect, []
    trainer.play = lambda tasks, **kwargs: settle_by_task(play(tasks, **kwargs))
    trainer._collect = lambda tasks: batches.append(collect(tasks)) or batches[-1]
    return trainer, batches


def test_a_run_with_resampling_resumes_bit_equal_inside_a_batch(tmp_path):
    """Two optimizer steps per batch; the checkpoint lies between them, and later batches replace groups too."""
    settings = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "save_steps": 3, "max_resamples": 30}
    straight, batches = watched(tmp_path / "straight", **settings)
    straight.train()
    assert len(batches) == 3 and len(batches[2].played) > ROWS
    resumed, again = watched(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    assert [batch.tasks for batch in again] == [batches[2].tasks]
    assert_bit_equal(weights(resumed), weights(straight))
    for name in ("loss", "dapo/overlong", "rollout/resampled_groups"):
        assert logged(resumed, name) == logged(straight, name), name


def test_fields_of_trl_that_are_not_dapos_are_told(tmp_path):
    with pytest.warns(UserWarning, match="'dapo' with epsilon_high None, where DAPO uses 0.28; loss_type grpo, where"):
        make_config(tmp_path, policy_method="dapo", loss_type="grpo")
