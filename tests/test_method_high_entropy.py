"""Policy gradients of the tokens with the highest entropy: by hand, over ranks, in plain loops, and TRL's selection."""

import pytest
import torch
from method_batches import batch_of
from plain_steps import step_of
from trainer_kit import compute_in_float64, difference, largest

from epo_trl.methods.high_entropy import HighEntropy

ADVANTAGES = torch.tensor([[1.0, -2.0, 3.0, 9.0], [-4.0, 5.0, 9.0, 9.0]])
KEPT = {
    0.2: [[0, 1, 0], [0, 0, 0]],
    0.59: [[0, 1, 0], [1, 0, 0]],  # two of five, rounded down
    0.6: [[0, 1, 1], [1, 0, 0]],
    0.01: [[0, 1, 0], [0, 0, 0]],  # at least one
    1.0: [[1, 1, 1], [1, 1, 0]],  # also a token without entropy
}


@pytest.mark.parametrize(("share", "kept"), KEPT.items(), ids=str)
def test_by_hand(share, kept):
    """What the mask leaves out is in no share, whatever its entropy is."""
    entropy = [[0.1, 2.0, 0.3, 9.0], [1.0, 0.0, 9.0, 9.0]]
    batch = batch_of([[0, 0, 1, 1], [0, 0, 0, -1]], mask=[[1, 1, 1, 0], [1, 1, 0, 0]], entropy=entropy)
    shaped = HighEntropy(share).modify_advantages(ADVANTAGES, batch)
    assert torch.equal(shaped.advantages[:, :3], ADVANTAGES[:, :3] * torch.tensor(kept))
    assert shaped.metrics == {"high-entropy/kept": pytest.approx(sum(map(sum, kept)) / 5)}


def test_trls_selection_goes_by_the_micro_batch(tmp_path, monkeypatch):
    """With one micro-batch both keep the same tokens (8 of 39 above TRL's quantile); with four TRL's are others."""
    compute_in_float64(monkeypatch)
    whole, cut = (
        [
            step_of(tmp_path, "windowed", parts, **changes)
            for changes in (
                {"entropy_method": ["high-entropy"], "method_kwargs": {"high-entropy": {"share": 8 / 39}}},
                {"entropy_method": [], "top_entropy_quantile": 0.2},
            )
        ]
        for parts in (1, 4)
    )
    scale = largest(whole[0])
    assert difference(*whole) < 1e-6 * scale and difference(whole[0], cut[0]) < 1e-6 * scale
    assert difference(whole[1], cut[1]) > 1e-2 * scale
