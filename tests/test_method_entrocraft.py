"""Entrocraft: which advantages are kept on each side of the band, and its schedule."""

import pytest
import torch
from method_batches import batch_of

from epo_trl.methods.entrocraft import Entrocraft

ADVANTAGES = torch.tensor([[1.0, -2.0, 0.5, 0.0]])


def batch_with(entropy, rl_step=0):
    """Returns a batch whose three tokens have that mean entropy; padding has another."""
    values = [[entropy - 0.1, entropy, entropy + 0.1, 50.0]]
    return batch_of([[0, 0, 1, -1]], entropy=values, rl_step=rl_step, total_rl_steps=5)


@pytest.mark.parametrize(
    ("entropy", "kept"),
    [
        (0.71, [1.0, 0.0, 0.5, 0.0]),
        (0.69, [1.0, -2.0, 0.5, 0.0]),
        (0.61, [1.0, -2.0, 0.5, 0.0]),
        (0.59, [0.0, -2.0, 0.0, 0.0]),
    ],
)
def test_above_the_band_only_positive_advantages_and_below_only_negative_ones(entropy, kept):
    shaped = Entrocraft().modify_advantages(ADVANTAGES, batch_with(entropy))
    assert torch.equal(shaped.advantages, torch.tensor([kept]))
    dropped = sum(a != b for a, b in zip(kept, ADVANTAGES[0].tolist(), strict=True)) / 3
    assert shaped.metrics == {
        "entrocraft/low": 0.6, "entrocraft/high": 0.7, "entrocraft/dropped": pytest.approx(dropped)
    }  # fmt: skip


def test_the_band_moves_linearly_to_its_end():
    bands = [Entrocraft().modify_advantages(ADVANTAGES, batch_with(1.0, step)).metrics for step in range(5)]
    assert [m["entrocraft/low"] for m in bands] == pytest.approx([0.6, 0.55, 0.5, 0.45, 0.4])
    assert [m["entrocraft/high"] for m in bands] == pytest.approx([0.7, 0.65, 0.6, 0.55, 0.5])
    last = Entrocraft().modify_advantages(ADVANTAGES, batch_with(0.59, 4)).advantages
    assert torch.equal(last, ADVANTAGES.clamp(min=0)), "0.59 is below the first band and above the last one"
