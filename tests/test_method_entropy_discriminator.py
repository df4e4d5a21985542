"""Clip_B and Clip_V: choices by hand, and the statistic of the head."""

import math

import pytest
import torch
from fused_heads import head_of
from method_batches import batch_of, record_calls
from trainer_kit import make_trainer, with_episodes

from epo_trl.methods.entropy_discriminator import ClipB, ClipV, discriminators, mean_discriminator


def with_discriminators(values, means=None):
    """Returns a batch of two rows, three tokens and two, with these S: p = 1/e and H = 1 + e S give p (H + log p)."""
    entropy = 1 + math.e * torch.tensor(values, dtype=torch.float64)
    logps, statistics = torch.full_like(entropy, -1.0), means and {"mean": means}
    return batch_of([[0, 0, 1], [0, 0, -1]], logps=logps, entropy=entropy, statistics=statistics)


# ------------------------------------------------------------------------------------------------------------- by hand


def test_clip_b_by_hand():
    """S is 1, 1, 1, 1, 0: mean 0.8, population deviation 0.4, so the last lies two below; 1.79 by the sample's."""
    batch = with_discriminators([[1.0, 1.0, 1.0], [1.0, 0.0, -9.0]])
    torch.testing.assert_close(discriminators(batch)[1, :2], torch.tensor([1.0, 0.0], dtype=torch.float64))
    negative = torch.tensor([[-1.0, 2.0, -3.0], [4.0, -5.0, -6.0]])
    removed = ClipB(mu=1.95).modify_advantages(negative, batch)
    assert removed.advantages.tolist() == [[-1.0, 2.0, -3.0], [4.0, 0.0, -6.0]]
    assert removed.metrics == {"clip-b/removed": pytest.approx(1 / 5)}
    for mu, advantages in ((2.05, negative), (1.95, negative.abs()), (1.95, 0 * negative)):
        kept = ClipB(mu=mu).modify_advantages(advantages, batch)
        assert torch.equal(kept.advantages, advantages) and kept.metrics == {"clip-b/removed": 0.0}


def test_clip_v_by_hand():
    """All S are 0, so D is E[S]: 4, 2, 2, 0, 2 with a population deviation of sqrt(8 / 5) = 1.265, not centred."""
    batch = with_discriminators([[0.0] * 3, [0.0] * 3], [[4.0, 2.0, 2.0], [0.0, 2.0, 99.0]])
    negative = torch.tensor([[-1.0, -1.0, 1.0], [-1.0, -1.0, -1.0]])

    def removed(advantages=negative, **settings):
        shaped = ClipV(**settings).modify_advantages(advantages, batch)
        assert torch.equal(shaped.advantages[shaped.advantages != 0], advantages[shaped.advantages != 0])
        places = (shaped.advantages == 0).nonzero().tolist()
        assert shaped.metrics["clip-v/removed"] == pytest.approx(len(places) / 5)
        return places, round(5 * shaped.metrics["clip-v/candidates"])

    assert removed(mu=1.5, max_share=1.0) == ([[0, 0], [0, 1], [1, 1]], 3)
    assert removed(mu=1.6, max_share=1.0) == ([[0, 0]], 1)
    assert removed(mu=1.5, max_share=0.59) == ([[0, 0], [0, 1]], 3), "two of five; of equals the first"
    assert removed(mu=1.5) == ([[0, 0]], 3), "at least one"
    assert removed(mu=1.5, max_share=0.0) == ([], 3) and removed(mu=3.2, max_share=1.0) == ([], 0)
    assert removed(-negative, mu=1.5, max_share=1.0) == ([[0, 2]], 1)


# -------------------------------------------------------------------------------------------- the statistic of the head


def test_the_mean_of_the_discriminator_by_hand():
    p = [0.5, 0.3, 0.2]
    entropy = -sum(x * math.log(x) for x in p)
    _, logits = head_of([p, [0.25] * 3])
    by_hand = sum(x * x * (entropy + math.log(x)) for x in p)
    assert mean_discriminator(logits.detach()).tolist() == pytest.approx([by_hand, 0.0], abs=1e-12)
    rising = logits.detach().requires_grad_()
    log_p = rising.log_softmax(-1)
    (slope,) = torch.autograd.grad(-(log_p.exp() * log_p).sum(), rising)
    torch.testing.assert_close(
        mean_discriminator(logits.detach()), -(log_p.exp() * slope).sum(-1).detach()
    )  # dH/dz = -S


def test_only_collection_pays_for_it(tmp_path):
    trainer = with_episodes(make_trainer(tmp_path, entropy_method=["clip-v"]))
    calls = record_calls(trainer.methods["clip-v"], "loss")
    trainer.args.max_steps = 1
    trainer.train()
    [((micro,), _)] = calls
    assert not micro.statistics
