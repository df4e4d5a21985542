"""Gated rewards: by hand, and over ranks."""

import math

import torch

from epo_trl.methods import Comm, StepSummary
from epo_trl.methods.gated import Gated
from epo_trl.types import Episode, StopReason, Turn


def episode(turns, stop=StopReason.TURN_LIMIT):
    """Returns an episode of `(reward, the environment's own)` turns."""
    return Episode(
        "train/0", "", "", tuple(Turn((1,), (2,), "", "", "", True, r, env_reward=e) for r, e in turns), stop
    )


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
