"""Gated rewards: by hand, across ranks, and in what TRL's advantages are made of."""

import math
from dataclasses import replace

import pytest
import torch
from run_kit import logged
from trainer_kit import catch_step, make_episodes, make_trainer, results_of

from epo_trl.methods import Comm, StepSummary
from epo_trl.methods.gated import Gated
from epo_trl.types import Episode, StopReason, Turn

SETTINGS = {"method_kwargs": {"gated": {"threshold": 5.0, "weight": 0.5}}}


def episode(turns, stop=StopReason.TURN_LIMIT):
    """Returns an episode of `(reward, the environment's own)` turns."""
    return Episode(
        "train/0", "", "", tuple(Turn((1,), (2,), "", "", "", True, r, env_reward=e) for r, e in turns), stop
    )


def trainer_of(folder, **changes):
    """Returns a trainer whose environments pay for each turn of the episodes made by hand."""
    trainer = make_trainer(folder, **changes)
    trainer.play = lambda tasks, **kwargs: [
        replace(e, turns=tuple(replace(t, env_reward=1.0 + i % 3) for t in e.turns))
        for i, e in enumerate(make_episodes())
    ]
    return trainer


def test_by_hand():
    """9.9 is above 5, so the environment's 2 and 4 count half; 5 is not above 5."""
    method = Gated(threshold=5.0, weight=0.5)
    assert method.turn_rewards(episode([(-0.1, 2.0), (10.0, 4.0)])) == [0.9, 12.0]
    assert method.turn_rewards(episode([(0.0, 2.0), (5.0, 4.0)])) is None
    assert method.turn_rewards(episode([(10.0, 4.0)], StopReason.ABORTED)) == [12.0]
    sums = []
    two = Comm(sum=lambda counts: sums.append(counts) or counts + torch.tensor([2.0, 2.0]), count=2)
    step = StepSummary(math.nan, {}, two)
    assert method.end_rl_step(step) == {"gated/open": 3 / 4} and sums[0].tolist() == [1, 2]
    assert method.end_rl_step(StepSummary(math.nan, {})) == {"gated/open": 0.0}


def test_the_advantage_is_that_of_the_gated_return_in_its_group(tmp_path):
    """Of group 0 the first and the last solve the task: 10 + 0.5 * 3 turns of 1, and 9.8 + 0.5 * 2 turns of 1."""
    trainer = trainer_of(tmp_path, credit="gated", scale_rewards="none", **SETTINGS)
    batches = results_of(trainer, "_method_batch")
    catch_step(trainer)
    returns = torch.tensor([11.5, -0.1, 0.0, 10.8])
    torch.testing.assert_close(batches[0].group_advantages[:4], returns - returns.mean(), rtol=0, atol=1e-5)
    assert logged(trainer, "gated/open") == [pytest.approx(3 / 7)]
