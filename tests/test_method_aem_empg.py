"""AEM and EMPG: weights of turns worked out by hand, and batches without differences."""

import math

import pytest
import torch
from method_batches import batch_of

from epo_trl.methods.aem import AEM
from epo_trl.methods.empg import EMPG

# Two episodes of group 0, one of group 1 and one without a token. Means of the turns: 1 and 3, 2; 5 and 5.
TURNS = [[0, 0, 1, -1], [0, 0, 0, 0], [0, 1, 1, -1], [0, 0, 0, 0]]
ENTROPY = [[0.5, 1.5, 3.0, 0.0], [2.0, 1.0, 3.0, 2.0], [5.0, 4.0, 6.0, 0.0], [9.0, 9.0, 9.0, 9.0]]
MASK = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]
GROUPS = [0, 0, 1, 0]
ADVANTAGES = torch.tensor([[1.0, 1.0, 1.0, 0.0], [-1.0, -1.0, -1.0, -1.0], [2.0, 2.0, 2.0, 0.0], [0.0] * 4])


def hand_made():
    return batch_of(TURNS, entropy=ENTROPY, mask=MASK, group_ids=GROUPS)


def test_aem_by_hand():
    """Group 0 has h = 0, 1 and 1/2 with T = 2; group 1's turns are equal, so their weight is 1."""
    shaped = AEM(temperature=2.0).modify_advantages(ADVANTAGES, hand_made())
    mean = (1 + math.exp(-2) + math.exp(-1)) / 3
    a, b, c = 1 / mean, math.exp(-2) / mean, math.exp(-1) / mean
    want = torch.tensor([[a, a, b, 0.0], [-c] * 4, [2.0, 2.0, 2.0, 0.0], [0.0] * 4])
    torch.testing.assert_close(shaped.advantages, want)
    assert shaped.metrics == {"aem/weight_min": pytest.approx(b), "aem/weight_max": pytest.approx(a)}


def test_empg_by_hand():
    """h = 0 and 1/2; 1/4; 1 and 1 over the batch, with k = 1. Bonus only before a next turn."""
    f = [math.exp(-x) for x in (0, 0.5, 0.25, 1, 1)]
    mean = sum(f) / 5
    plain = EMPG(zeta=0.5, center=False).modify_advantages(ADVANTAGES, hand_made())
    a, b, c = f[0] / mean + 0.5 * f[1], f[1] / mean, -f[2] / mean
    d, e = 2 * f[3] / mean + 0.5 * f[4], 2 * f[4] / mean
    want = torch.tensor([[a, a, b, 0.0], [c] * 4, [d, e, e, 0.0], [0.0] * 4])
    torch.testing.assert_close(plain.advantages, want)
    assert plain.metrics == {"empg/weight_min": pytest.approx(f[3] / mean), "empg/weight_max": pytest.approx(1 / mean)}
    m, n = (a + b + c) / 3, (d + e) / 2
    centred = EMPG(zeta=0.5).modify_advantages(ADVANTAGES, hand_made()).advantages
    want = torch.tensor([[a - m, a - m, b - m, 0.0], [c - m] * 4, [d - n, e - n, e - n, 0.0], [0.0] * 4])
    torch.testing.assert_close(centred, want)


def test_turns_whose_entropies_differ_by_rounding_have_the_same_weight():
    """Two passes over the same turn in batches of different widths."""
    batch = batch_of([[0, 1], [0, 1]], entropy=[[1.0, 1.0 + 1e-6], [1.0 + 3e-7, 1.0]], mask=[[1, 1], [1, 1]])
    advantages = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    assert torch.equal(AEM().modify_advantages(advantages, batch).advantages, advantages)
    shaped = EMPG(zeta=0.5, center=False).modify_advantages(advantages, batch).advantages
    assert torch.equal(shaped, torch.tensor([[1.5, 1.0], [-0.5, -1.0]]))


@pytest.mark.parametrize("method", [AEM(), EMPG()])
def test_a_batch_without_a_token_stays_as_it_is(method):
    batch = batch_of([[0, 0], [0, 1]], entropy=[[1.0, 2.0], [3.0, 4.0]], mask=[[0, 0], [0, 0]])
    assert not method.modify_advantages(torch.zeros(2, 2), batch).advantages.any()
