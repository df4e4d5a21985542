"""The statistics of the LM head: against whole distributions, on every kind of head, however the turns are scored."""

from functools import partial

import pytest
import torch
from fused_heads import HEADS, IDS, PROMPTS, RESPONSE, TURNS, disturbed, nucleus_entropy_of
from trainer_kit import assert_same_function, make_model
from trl.trainer.utils import add_fused_lm_head

from epo_trl.methods.entropy_discriminator import ClipV
from epo_trl.methods.ref_nucleus import ReferenceNucleus
from epo_trl.methods.siren import SIREN, top_p_entropy
from epo_trl.scoring.turn_forward import Passes, score_turns
from epo_trl.scoring.turn_layout import TurnLayout, cut_turns

CUT, TOP_P = 0.03, 0.8


def mean_discriminator_of(logits, _):
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    return ((2 * log_p).exp() * (entropy + log_p)).sum(-1)


PLAIN = {
    "nucleus": partial(nucleus_entropy_of, cut=CUT),
    "top_p": lambda logits, _: top_p_entropy(logits, TOP_P),
    "discriminator": mean_discriminator_of,
}


def cut(windowed):
    return cut_turns(IDS, TurnLayout(TURNS, RESPONSE, PROMPTS, windowed=windowed))


def fused(*models, temperature=1.0):
    for model in models:
        add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    return models


@torch.no_grad()
def candidates_of(reference, batch, passes=Passes()):  # noqa: B008
    statistic = ReferenceNucleus(cut=CUT).reference_statistics["candidates"]
    found = score_turns(reference, batch, passes=passes, statistics={"": lambda head, tokens: statistic(head, {})})
    return found.statistics[""]


def asked(reference, batch, *needs):
    """Returns the statistics to ask for: those named, or all."""
    method, candidates = ReferenceNucleus(cut=CUT), candidates_of(reference, batch)
    every = {
        "nucleus": lambda head, tokens: method.loss_statistics["entropy"](head, {"candidates": candidates[tokens]}),
        "top_p": lambda head, tokens: SIREN(top_p=TOP_P).loss_statistics["entropy"](head, {}),
        "discriminator": lambda head, tokens: ClipV.statistics["mean"](head, {}),
    }
    return {need: every[need] for need in needs or every}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("need", PLAIN)
def test_it_is_what_the_whole_distribution_gives(need, head):
    reference, temperature, batch = HEADS[head](), 0.7, cut(windowed=False)
    model = disturbed(reference)
    wanted = torch.zeros(batch.labels[:, 1:].shape, dtype=torch.float64)
    for i, length in enumerate(batch.lengths.tolist()):
        ids = batch.input_ids[i, :length][None]
        logits, others = (one(ids).logits[0, :-1].double() / temperature for one in (model, reference))
        wanted[i, : length - 1] = PLAIN[need](logits, others.detach())
    wanted = wanted[batch.sequence, batch.position - 1]
    assert (wanted.abs() > (0.1 if need != "discriminator" else 0.005)).sum() > 0

    fused(model, reference, temperature=temperature)
    got = score_turns(model, batch, statistics=asked(reference, batch, need)).statistics[need]
    assert_same_function(model, got, wanted)


@pytest.mark.parametrize("windowed", [True, False])
@pytest.mark.parametrize("way", [Passes(16), Passes(4, recompute=True)], ids=str)
def test_they_do_not_depend_on_the_forward_passes(windowed, way):
    reference, batch = make_model(), cut(windowed)
    model = disturbed(reference)
    fused(model, reference)
    assert torch.equal(candidates_of(reference, batch), candidates_of(reference, batch, way))
    statistics = asked(reference, batch)
    one, other = (score_turns(model, batch, statistics=statistics, passes=each) for each in (Passes(), way))
    torch.testing.assert_close(one.log_probs, other.log_probs)
    for need in PLAIN:
        assert one.statistics[need].abs().max() > 0.005
        torch.testing.assert_close(one.statistics[need], other.statistics[need])


@pytest.mark.parametrize("autocast", [True, False])
def test_they_take_half_precision_and_give_single(autocast):
    whole, batch = make_model(), cut(windowed=True)
    model = make_model() if autocast else make_model().bfloat16()
    fused(whole, model)
    statistics = asked(whole, batch)
    exact = score_turns(whole, batch, statistics=statistics).statistics
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = score_turns(model, batch, statistics=statistics).statistics
    for need in PLAIN:
        assert found[need].dtype == torch.float32
        assert (found[need] - exact[need]).abs().median() < 0.05
    entropy = found["nucleus"] + found["top_p"]
    assert entropy.max() > 0.1
    entropy.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert all(parameter.grad.dtype == parameter.dtype for parameter in model.parameters())
