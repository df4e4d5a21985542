"""AEPO: factors by hand, and the gradient of clipped tokens against the paper's formula."""

import pytest
import torch
from method_batches import batch_of, micro_of

from epo_trl.methods.aepo import AEPO


def test_factors_by_hand():
    """Entropies 1, 1, 3, 3: mean 2, deviation 1; equal entropies have z = 0."""
    advantages = torch.tensor([[1.0, -1.0, 1.0, 0.0], [-2.0, 0.0, 0.0, 0.0]])
    batch = batch_of([[0, 0, 1, -1], [0, -1, -1, -1]], entropy=[[1.0, 1.0, 3.0, 50.0], [3.0, 50.0, 50.0, 50.0]])
    shaped = AEPO().modify_advantages(advantages, batch)
    torch.testing.assert_close(shaped.advantages, torch.tensor([[0.8, -0.8, 1.2, 0.0], [-2.4, 0.0, 0.0, 0.0]]))
    assert shaped.metrics == {"aepo/factor_min": pytest.approx(0.8), "aepo/factor_max": pytest.approx(1.2)}
    flat = batch_of([[0, 0, 1, -1], [0, -1, -1, -1]], entropy=[[2.0] * 4] * 2)
    assert torch.equal(AEPO().modify_advantages(advantages, flat).advantages, advantages)


@pytest.mark.parametrize(("high", "bound"), [(None, 1.2), (0.3, 1.3)])
def test_tokens_clipped_from_above_keep_the_gradient_of_the_papers_loss_and_no_others(high, bound):
    """Ratios 0.5, 1 and 1.5 with advantages of both signs: only 1.5 with a positive one is clipped from above."""
    ratios, advantages = torch.tensor([[0.5, 1.0, 1.5] * 2]), torch.tensor([[2.0] * 3 + [-2.0] * 3])
    old = torch.full((1, 6), -1.0)

    def gradient(loss):
        logps = (old + ratios.log()).requires_grad_()
        value = loss(logps)
        value.backward()
        return value.detach(), logps.grad

    def trl(logps):
        ratio = (logps - old).exp()
        return -torch.min(ratio * advantages, ratio.clamp(0.8, bound) * advantages).sum()

    def paper(logps):
        ratio = (logps - old).exp()
        kept = torch.where(ratio > bound, bound * ratio / ratio.detach(), ratio.clamp(min=0.8))
        return -torch.min(ratio * advantages, kept * advantages).sum()

    def ours(logps):
        micro = micro_of(torch.zeros(1, 6), logps=logps, old_logps=old, advantages=advantages)
        return trl(logps) + AEPO(epsilon_high=high).loss(micro)

    (value, plain), (want_value, want), (got_value, got) = gradient(trl), gradient(paper), gradient(ours)
    assert value == want_value == got_value
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got - plain, torch.tensor([[0.0, 0.0, -2.0 * bound, 0.0, 0.0, 0.0]]))
