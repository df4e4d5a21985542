"""TRL sees episodes, the model sees turns: the cutting by eye, and the numbers against plain forwards.

Literal tensors: `_` is padding (0 in the ids, -1 in the turn ids), tens of a token id are its turn.
"""

import random

import pytest
import torch
import trl.trainer.utils as trl_utils
from fused_heads import HEADS, make_mixture
from trainer_kit import (
    catch_step,
    collected,
    compute_in_float64,
    difference,
    largest,
    make_model,
    make_trainer,
    results_of,
    with_episodes,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl.trainer.utils import add_fused_lm_head

from epo_trl.scoring.fused_head import compact_scoring
from epo_trl.scoring.turn_forward import Passes, score_turns
from epo_trl.scoring.turn_layout import TurnLayout, cut_turns

CONTEXTS = ("windowed", "concatenated")
_ = 0
# Row 0: prompt 10 11 12, response 13 14 | prompt 20 21, response 22 | prompt 30, response 31 32
# Row 1: prompt 15, response 16 | prompt 25 26, response 27 28
# Row 2: prompt 17 18, response 19
IDS = torch.tensor(
    [
        [10, 11, 12, 13, 14, 20, 21, 22, 30, 31, 32],
        [_, _, 15, 16, 25, 26, 27, 28, _, _, _],
        [_, 17, 18, 19, _, _, _, _, _, _, _],
    ]
)
PROMPTS = torch.tensor([3, 1, 2])
TURNS = torch.tensor(
    [
        [0, 0, 1, 1, 1, 2, 2, 2],
        [0, 1, 1, 1, 1, -1, -1, -1],
        [0, -1, -1, -1, -1, -1, -1, -1],
    ]
)
RESPONSE = torch.tensor(
    [
        [1, 1, 0, 0, 1, 0, 1, 1],
        [1, 0, 0, 1, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0],
    ]
)


# ------------------------------------------------------------------------------------------------------------- by eye


def test_windowed_every_turn_is_a_sequence():
    batch = cut_turns(IDS, TurnLayout(TURNS, RESPONSE, PROMPTS, windowed=True))
    assert batch.input_ids.tolist() == [
        [10, 11, 12, 13, 14],
        [20, 21, 22, _, _],
        [30, 31, 32, _, _],
        [15, 16, _, _, _],
        [25, 26, 27, 28, _],
        [17, 18, 19, _, _],
    ]
    no = -100
    assert batch.labels.tolist() == [
        [no, no, no, 13, 14],
        [no, no, 22, no, no],
        [no, 31, 32, no, no],
        [no, 16, no, no, no],
        [no, no, 27, 28, no],
        [no, no, 19, no, no],
    ]
    assert batch.sequence.tolist() == [0, 0, 1, 2, 2, 3, 4, 4, 5]
    assert batch.position.tolist() == [3, 4, 2, 1, 2, 1, 2, 3, 2]


def test_concatenated_the_row_is_one_sequence():
    batch = cut_turns(IDS, TurnLayout(TURNS, RESPONSE, PROMPTS, windowed=False))
    assert batch.input_ids.tolist() == [
        [10, 11, 12, 13, 14, 20, 21, 22, 30, 31, 32],
        [15, 16, 25, 26, 27, 28, _, _, _, _, _],
        [17, 18, 19, _, _, _, _, _, _, _, _],
    ]
    no = -100
    assert batch.labels.tolist() == [
        [no, no, no, 13, 14, no, no, 22, no, 31, 32],
        [no, 16, no, no, 27, 28, no, no, no, no, no],
        [no, no, 19, no, no, no, no, no, no, no, no],
    ]


@pytest.mark.parametrize("windowed", [True, False])
def test_values_go_back_to_the_token_that_they_belong_to(windowed):
    """Here the value is the token's id."""
    batch = cut_turns(IDS, TurnLayout(TURNS, RESPONSE, PROMPTS, windowed=windowed))
    assert batch.to_rows(batch.input_ids[batch.sequence, batch.position].float()).tolist() == [
        [13, 14, 0, 0, 22, 0, 31, 32],
        [16, 0, 0, 27, 28, 0, 0, 0],
        [19, 0, 0, 0, 0, 0, 0, 0],
    ]


def test_tool_mask_of_ones_on_padding_is_harmless():
    """TRL pads the tool mask with ones."""
    padded_with_ones = torch.where(TURNS < 0, 1, RESPONSE)
    one = cut_turns(IDS, TurnLayout(TURNS, RESPONSE, PROMPTS, windowed=True))
    other = cut_turns(IDS, TurnLayout(TURNS, padded_with_ones, PROMPTS, windowed=True))
    assert torch.equal(one.labels, other.labels) and torch.equal(one.column, other.column)


def test_a_batch_without_sampled_tokens_scores_to_zero_and_still_reaches_the_model():
    batch = cut_turns(IDS, TurnLayout(TURNS, torch.zeros_like(RESPONSE), PROMPTS, windowed=True))
    model = scoring_model("llama")
    rows = batch.to_rows(score_turns(model, batch).log_probs)
    assert rows.shape == TURNS.shape and not rows.any()
    rows.sum().backward()  # every rank has to make a backward pass
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


# ------------------------------------------------------------------------------------------ compact scoring on the CPU


def scoring_model(family, **sizes):
    model = make_model(family, **sizes)
    add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
    return model


def test_an_entropy_that_the_head_rounds_below_zero_is_zero():
    """A logit of 120, the next one 17 below: the true entropy is 7e-7, and the sums of float32 are 8e-6 apart."""
    model = HEADS["bias"]()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.fill_(-50.0)
        model.lm_head.bias[:2] = torch.tensor([120.0, 103.0])
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    batch = cut_turns(IDS, TurnLayout(TURNS, RESPONSE, PROMPTS, windowed=True))
    raw = model(input_ids=batch.input_ids, labels=batch.labels, fused_lm_head=True).entropy
    assert (raw[batch.labels[:, 1:] != -100] < 0).all()
    assert not score_turns(model, batch).entropy.any()


def scores(model, batch):
    model.zero_grad()
    output = model(input_ids=batch.input_ids, labels=batch.labels, fused_lm_head=True)
    (output.log_probs.sum() + output.entropy.square().sum()).backward()
    return output.log_probs.detach(), output.entropy.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("windowed", [True, False])
def test_compact_scoring_changes_neither_values_nor_gradients(monkeypatch, windowed):
    compute_in_float64(monkeypatch)
    model = scoring_model("llama").double()
    batch = cut_turns(IDS, TurnLayout(TURNS, RESPONSE, PROMPTS, windowed=windowed))
    seen = []
    head = trl_utils._ChunkedLogProbFunction
    monkeypatch.setattr(
        trl_utils,
        "_ChunkedLogProbFunction",
        type("Head", (), {"apply": staticmethod(lambda *args: seen.append(len(args[0])) or head.apply(*args))}),
    )
    everything = scores(model, batch)
    with compact_scoring():
        compact = scores(model, batch)
    assert seen == [batch.labels[:, 1:].numel(), int(RESPONSE.sum())], "only sampled tokens go through the head"
    assert everything[0].abs().sum() > 1 and max(float(g.abs().max()) for g in everything[2]) > 0.1
    for one, other in zip((*everything[:2], *everything[2]), (*compact[:2], *compact[2]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


AS_OTHERS = Passes(24, agree=lambda count: count + 2)  # another rank needs two more
AGAIN = Passes(8, recompute=True)
AGAIN_AS_OTHERS = Passes(24, recompute=True, agree=lambda count: count + 2)
WAYS = [Passes(24), Passes(4), AGAIN, AS_OTHERS, AGAIN_AS_OTHERS]


@pytest.mark.parametrize("limit", [1, 40, 1000, 10**6])
def test_a_pass_has_no_more_tokens_than_the_limit(limit):
    rng = random.Random(limit)
    for count in (1, 2, 30, 200):
        lengths = sorted((rng.randint(2, 90) for _ in range(count)), reverse=True)
        sizes = Passes(limit).sizes(lengths)
        parts, start = [], 0
        for size in sizes:
            parts.append(lengths[start : start + size])
            start += size
        assert start == count and all(parts)
        costs = [len(part) * part[0] for part in parts]
        assert all(cost <= limit or len(part) == 1 for cost, part in zip(costs, parts, strict=True))
        more = Passes(limit, agree=lambda own: own + 3).sizes(lengths)
        assert len(more) == len(sizes) + 3 and more.count(0) <= 3 and sum(more) == count
    assert Passes().sizes(lengths) == [count]


@pytest.mark.parametrize("windowed", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_values_and_gradients_do_not_depend_on_the_passes(monkeypatch, windowed, way):
    """Six turns (windowed) or three rows, of lengths 2 to 11, in one padded pass and otherwise."""
    compute_in_float64(monkeypatch)
    model = scoring_model("llama").double()
    batch = cut_turns(IDS, TurnLayout(TURNS, RESPONSE, PROMPTS, windowed=windowed))
    found = []
    for passes in (Passes(), way):
        model.zero_grad()
        found.append(score_turns(model, batch, passes=passes))
        (found[-1].log_probs.sum() + found[-1].entropy.square().sum()).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    one, one_gradient, other, other_gradient = found
    assert one.log_probs.abs().sum() > 1 and max(float(g.abs().max()) for g in one_gradient) > 0.1
    torch.testing.assert_close(other.log_probs, one.log_probs, rtol=0, atol=1e-12)
    torch.testing.assert_close(other.entropy, one.entropy, rtol=0, atol=1e-12)
    torch.testing.assert_close(other_gradient, one_gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("windowed", [True, False])
@pytest.mark.parametrize("way", [Passes(), Passes(16), AGAIN, AS_OTHERS, AGAIN_AS_OTHERS], ids=str)
def test_the_router_loss_is_that_of_the_turns_alone(windowed, way):
    """Reference: every turn by itself, no padding; the third row has no sampled token (it was aborted)."""
    model = make_mixture()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    response = RESPONSE.clone()
    response[2] = 0
    batch = cut_turns(IDS, TurnLayout(TURNS, response, PROMPTS, windowed=windowed))
    logits = []
    for ids, labels, length in zip(batch.input_ids, batch.labels, batch.lengths, strict=True):
        if (labels != -100).any():
            output = model(input_ids=ids[None, :length], output_router_logits=True)
            logits.append(output.router_logits)
    assert len(logits) == (5 if windowed else 2)
    expected = load_balancing_loss_func(tuple(torch.cat(layer) for layer in zip(*logits, strict=True)), 4, 2)
    aux_loss = score_turns(model, batch, output_router_logits=True, passes=way).aux_loss
    torch.testing.assert_close(aux_loss, expected, rtol=1e-5, atol=1e-6)
    aux_loss.backward()
    assert model.model.layers[0].mlp.gate.weight.grad.abs().max() > 1e-4
    assert score_turns(model, batch, passes=way).aux_loss is None


# ------------------------------------------------------------------------------ sampling time and update, real rollouts


def trainer_for(tmp_path, family, context, **changes):
    return make_trainer(
        tmp_path,
        model=make_model(family),
        context=context,
        temperature=0.8,
        max_completion_length=5,
        history_length=1,
        **changes,
    )


def update_logps(trainer, inputs):
    """Returns the (B, T) log-probs that `compute_loss` works with."""
    caught = results_of(trainer, "_get_per_token_logps_and_entropies")
    trainer.compute_loss(trainer.model, inputs)
    ((logps, *_),) = caught
    return logps.detach()


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("family", ["seed_oss", "llama", "gemma", "gemma2"])
def test_logps_of_the_update_are_those_of_sampling(tmp_path, monkeypatch, family, context):
    """The logits from which `generate` sampled, left-padded and cached, against one forward pass over cut turns."""
    trainer = trainer_for(tmp_path, family, context)
    sampled = []  # one list of log-probs per response, in the order of the calls
    generate = trainer.model.generate

    def keep_logits(**kwargs):
        config = kwargs.pop("generation_config")
        config.update(output_logits=True, return_dict_in_generate=True)
        output = generate(**kwargs, generation_config=config)
        config.update(output_logits=False, return_dict_in_generate=False)
        log_p = (torch.stack(output.logits, 1) / 0.8).log_softmax(-1)
        new = output.sequences[:, kwargs["input_ids"].shape[1] :]
        sampled.append(log_p.gather(-1, new.unsqueeze(-1)).squeeze(-1))
        return output.sequences

    monkeypatch.setattr(trainer.model, "generate", keep_logits)
    inputs = collected(trainer)
    got = update_logps(trainer, inputs)

    assert len(sampled) == 3 and {len(e.turns) for e in trainer.last_episodes} == {3}
    for row, episode in enumerate(trainer.last_episodes):
        at_sampling = [
            value for turn, t in zip(sampled, episode.turns, strict=True) for value in turn[row, : len(t.response_ids)]
        ]
        mask = inputs["tool_mask"][row].bool() & (inputs["turn_ids"][row] >= 0)
        torch.testing.assert_close(got[row][mask], torch.stack(at_sampling), rtol=0, atol=1e-4)
    assert got.min() < -2, "flat distributions agree with anything"


@pytest.mark.parametrize("context", CONTEXTS)
def test_padding_is_told_by_turn_ids_even_where_trl_clears_its_mask(tmp_path, context):
    """`mask_truncated_completions` clears the completion mask of a row; what its tokens see must stay the same."""
    trainer = with_episodes(trainer_for(tmp_path, "llama", context))
    inputs = collected(trainer)
    before = update_logps(trainer, inputs)
    inputs["completion_mask"][2] = 0
    assert before[2].any() and torch.equal(update_logps(trainer, inputs), before)


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS)
def test_neither_checkpointing_nor_passes_run_again_change_anything(tmp_path, context):
    results, forwards = [], []
    ways = ({}, {"gradient_checkpointing": True}, {"tokens_per_pass": 20, "recompute_passes": True})
    for changes in ways:
        trainer = with_episodes(trainer_for(tmp_path, "seed_oss", context, **changes))
        calls = []
        trainer.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        results.append(catch_step(trainer))
        forwards.append(len(calls))
    passes = forwards[2] // 2 + 1  # all run again but the last
    assert forwards == [1, 2, 2 * passes - 1] and passes > 2, "a layer runs again in the backward pass"
    (loss, gradients), *others = results
    assert largest(gradients) > 0.1
    for again, gradients_again in others:
        assert abs(float(loss - again)) < 1e-6 and difference(gradients, gradients_again) < 1e-6


# ------------------------------------------------------------------------------------------------------ who sees whom


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_token_sees_its_own_turn_and_in_concatenated_context_the_turns_before(tmp_path, family, context):
    """Other tokens in one turn of row 2 (four turns): windowed, no other log-prob of the batch moves by one bit."""
    trainer = with_episodes(trainer_for(tmp_path, family, context))
    inputs = collected(trainer)
    before = update_logps(trainer, inputs)

    row, turns = 2, inputs["turn_ids"]
    in_row = torch.zeros_like(turns).bool()
    in_row[row] = (inputs["tool_mask"].bool() & (turns >= 0))[row]
    for changed in (0, 1, 2):
        other = {name: value.clone() for name, value in inputs.items()}
        ids = other["prompt_ids"][row, -5:] if changed == 0 else other["completion_ids"][row]
        place = slice(None) if changed == 0 else turns[row] == changed
        ids[place] = 8 + (ids[place] + 1) % 50
        moved = update_logps(trainer, other) != before
        own, later = in_row & (turns == changed), in_row & (turns > changed)
        assert later.any() and torch.equal(moved, own | later if context == "concatenated" else own)
