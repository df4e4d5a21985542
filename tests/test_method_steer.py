"""STEER: the estimated change and the weights by hand, across ranks, and the formula of the paper in full."""

import math

import pytest
import torch
from method_batches import batch_of, random_batch

from epo_trl.methods.steer import STEER


def test_by_hand():
    """|Omega| = |A| (1 - pi) |ln pi + H|: 1, 1/2, and 1/4; the largest gets the least weight, 1/4, so k = ln 4."""
    ln2 = math.log(2)
    batch = batch_of(
        [[0, 0, 1, -1], [0, 0, 0, 0]], mask=[[1, 1, 1, 0], [0, 0, 0, 0]], logps=[[-ln2] * 3 + [0.0], [-ln2] * 4],
        entropy=[[ln2 + 1.0, ln2 - 0.5, ln2 + 0.25, 0.0], [9.0] * 4],
    )  # fmt: skip
    advantages = torch.tensor([[2.0, -2.0, 2.0, 0.0], [0.0] * 4])
    shaped = STEER(min_weight=0.25).modify_advantages(advantages, batch)
    weights = [4**-1, 4**-0.5, 4**-0.25]
    want = torch.tensor([[2 * weights[0], -2 * weights[1], 2 * weights[2], 0.0], [0.0] * 4])
    torch.testing.assert_close(shaped.advantages, want)
    assert shaped.metrics["steer/largest_change"] == pytest.approx(1.0)
    assert shaped.metrics["steer/weight"] == pytest.approx(sum(weights) / 3)
    floored = STEER(min_weight=0.25, floor=2.0).modify_advantages(advantages, batch).advantages
    torch.testing.assert_close(floored[0, 0], torch.tensor(2 * 4**-0.5))


def test_it_is_the_formula_of_the_paper_where_pi_is_pi_old():
    advantages, batch = random_batch()
    pi = batch.logps.exp()
    omega = (advantages / pi * pi * (1 - pi) * (pi.log() + batch.entropy))[batch.mask.bool()].abs()
    weights = (math.log(0.8) / max(omega.max(), 0.02) * omega).exp().clamp(0.8, 1)
    got = STEER().modify_advantages(advantages, batch).advantages[batch.mask.bool()]
    torch.testing.assert_close(got, advantages[batch.mask.bool()] * weights)
