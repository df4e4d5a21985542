"""The entropy over a policy's own nucleus: by hand, against sorted distributions, and as a gradient."""

import math
from contextlib import contextmanager

import pytest
import torch
from fused_heads import head_of

from epo_trl.methods import lm_head, siren
from epo_trl.methods.lm_head import LMHead
from epo_trl.methods.siren import top_p_entropy

F64 = torch.float64


def own_nucleus_entropy(head, share):
    return head.map(lambda logits: top_p_entropy(logits, share))


def entropy_of(weights):
    """Returns the entropy of numbers in that proportion."""
    return -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)


@pytest.mark.parametrize(
    ("probabilities", "share", "inside"),
    [
        ([0.15, 0.5, 0.05, 0.3], 0.8, [5, 3]),  # the two hold 0.8, no third is needed
        ([0.4, 0.3, 0.2, 0.1], 0.8, [4, 3, 2]),  # 0.7 is too little
        ([0.05, 0.9, 0.03, 0.02], 0.8, [9]),
        ([0.5, 0.25, 0.25], 0.7, [2, 1, 1]),  # of equals at the edge all are inside
        ([0.2] * 5, 0.8, [1] * 5),
        ([0.7, 0.2, 0.1], 0.5, [7]),
        ([0.7, 0.2, 0.1], 1.0, [7, 2, 1]),
    ],
)
def test_it_is_the_entropy_of_the_fewest_tokens_that_hold_the_share(probabilities, share, inside):
    logits = torch.tensor([probabilities], dtype=F64).log() + 3.0
    assert top_p_entropy(logits, share).tolist() == pytest.approx([entropy_of(inside)])


def test_its_gradient_by_hand():
    """-q (ln q + N) inside, for any function of logits; nothing outside and nothing where one token is enough."""
    head, logits = head_of([[0.5, 0.3, 0.15, 0.05], [0.9, 0.05, 0.03, 0.02]])
    own_nucleus_entropy(head, 0.8).sum().backward()
    whole = entropy_of([5, 3])
    push = [-q * (math.log(q) + whole) for q in (5 / 8, 3 / 8)]
    assert logits.grad.tolist() == [pytest.approx([*push, 0.0, 0.0]), [0.0] * 4]
    assert sum(push) == pytest.approx(0.0) and push[0] < 0 < push[1], "gradient ascent evens them out"


def test_it_is_what_sorting_gives(monkeypatch):
    """Also where more tokens are inside than are looked at first."""
    monkeypatch.setattr(siren, "FEW", 5)
    torch.manual_seed(0)
    logits = torch.cat([0.1 * torch.randn(20, 50), 2 * torch.randn(20, 50), 9 * torch.randn(20, 50)]).double()
    sizes = set()
    for share in (0.3, 0.8, 0.99):
        for one, entropy in zip(logits, top_p_entropy(logits, share), strict=True):
            falling = one.softmax(0).sort(descending=True).values.tolist()
            inside = [p for i, p in enumerate(falling) if sum(falling[:i]) < share]
            assert entropy.item() == pytest.approx(entropy_of(inside), abs=1e-9)
            sizes.add(len(inside))
    assert 1 in sizes and 5 in sizes and max(sizes) > 40


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_its_gradient_is_that_of_finite_differences(monkeypatch, softcap):
    """In parts, none of which has more logits than there is room for; a position without gradient is left out."""
    monkeypatch.setattr(lm_head, "CHUNK", 30)
    seen = []
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=F64).requires_grad_() for shape in ((7, 4), (12, 4), (12,))]
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0, -1.0, 3.0, 0.5], dtype=F64)

    def value(hidden, weight, bias):
        head = LMHead(hidden, weight, bias, 0.7, softcap, 1.3)
        return (weights * head.map(lambda z: seen.append(z.numel()) or top_p_entropy(z, 0.8))).sum()

    assert torch.autograd.gradcheck(value, inputs, eps=1e-7, atol=1e-5)
    assert value(*inputs).abs() > 0.1 and max(seen) <= 30
    (on_hidden,) = torch.autograd.grad(value(inputs[0], *(x.detach() for x in inputs[1:])), inputs[:1])
    torch.testing.assert_close(on_hidden, torch.autograd.grad(value(*inputs), inputs[:1])[0])  # a frozen head
    assert not on_hidden[[0, 3]].any() and on_hidden.any()


def test_a_head_that_was_split_after_the_forward_pass_is_whole_in_the_backward_pass():
    """As under ZeRO-3, played here by a weight that is there inside of TRL's context alone."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(shape, dtype=F64).requires_grad_() for shape in ((5, 4), (12, 4)))

    @contextmanager
    def gathered(*parameters):
        assert parameters[0].numel() == 0
        weight.data = whole
        yield
        weight.data = whole[:0]

    def entropy(*gather):
        return own_nucleus_entropy(LMHead(hidden, weight, None, 1.0, None, 1.0, *gather), 0.8).sum()

    wanted, whole = torch.autograd.grad(entropy(), (hidden, weight)), weight.data
    again = entropy(gathered)
    weight.data = whole[:0]
    for got, want in zip(torch.autograd.grad(again, (hidden, weight)), wanted, strict=True):
        assert torch.equal(got, want) and got.any()


def test_without_a_position_there_is_a_gradient_of_zero():
    head, logits = head_of([[0.5, 0.3, 0.2]])
    none = LMHead(logits[:0], head.weight.requires_grad_(), None, 1.0, None, 1.0)
    entropy = own_nucleus_entropy(none, 0.8)
    assert entropy.shape == (0,)
    entropy.sum().backward()
    assert not logits.grad.any() and not head.weight.grad.any()
