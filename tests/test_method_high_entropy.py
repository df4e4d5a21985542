"""The tokens with the highest entropy: by hand."""

import pytest
import torch
from method_batches import batch_of

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
