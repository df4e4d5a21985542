"""SIREN: peaks and term by hand, the square's gradient, the anchor, and a resumed run."""

import math

import pytest
import torch
from method_batches import batch_of, micro_of
from run_kit import assert_bit_equal, logged, weights
from trainer_kit import (
    catch_step,
    compute_in_float64,
    difference,
    give_credit,
    largest,
    make_episodes,
    make_model,
    make_trainer,
    with_episodes,
)

from epo_trl.methods.siren import SIREN, peak_tokens, top_p_entropy

NO = 9.0  # an entropy that must not count


def settings(weight=5.0, **more):
    return {"epo_lambda": 0.0, "entropy_method": ["siren"], "method_kwargs": {"siren": {"weight": weight, **more}}}


def trainer_of(folder, make=make_trainer, **changes):
    return with_episodes(make(folder, **{**settings(), **changes}))


# ----------------------------------------------------------------------------------------------------------- peaks


@pytest.mark.parametrize(
    ("entropy", "quantile", "peaks"),
    [
        ([0.1, 0.5, 0.2, 0.9, 0.3, 0.7], 0.8, [0.9]),  # the quantile is 0.7
        ([0.1, 0.5, 0.2, 0.9, 0.3], 0.8, [0.9]),  # 0.58
        ([0.1, 0.5, 0.2, 0.9, 0.3, 0.7, 0.0, 0.0, 0.0, 0.0, 0.6], 0.8, [0.9, 0.7]),  # 0.6
        ([0.0] * 9 + [0.4], 0.8, [0.4]),
        ([0.1, 0.5, 0.2], 0.0, [0.5, 0.2]),
        ([0.4, 0.4, 0.1], 0.8, [0.4, 0.4]),  # nothing is above the highest, so those at it
        ([0.3], 0.8, [0.3]),
        ([0.0, 0.0], 0.8, [0.0, 0.0]),
        ([], 0.8, []),
    ],
)
def test_peaks_by_hand(entropy, quantile, peaks):
    """Whatever is not counted does not matter."""
    row = torch.tensor([[NO, *entropy, NO]])
    mask = torch.tensor([[0, *(1 for _ in entropy), 0]])
    got = peak_tokens(row, mask, quantile)
    assert row[got].tolist() == pytest.approx(peaks) and not (got & (mask == 0)).any()


# ------------------------------------------------------------------------------------------------ the term by hand

TURNS = [[0, 0, 1, 1, 1], [0, 0, 0, -1, -1], [0, 0, 0, 0, 0]]
MASK = [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0] * 5]  # the last episode was aborted
ENTROPY = [[0.1, 0.4, 0.2, 0.6, NO], [0.2, 0.2, NO, NO, NO], [NO] * 5]
PEAKS = [[0, 1, 0, 1, 0], [1, 1, 0, 0, 0], [0] * 5]  # with a quantile of 1/3; Hbar = (0.5 + 0.2) / 2


def collected(entropy=ENTROPY, mask=MASK):
    return batch_of(TURNS, mask=mask, statistics={"entropy": entropy})


def batch_in_loss(entropy, peaks):
    entropy = torch.as_tensor(entropy).clone().requires_grad_()
    return micro_of(TURNS, mask=torch.tensor(MASK), num_episodes=2.0, statistics={"entropy": entropy},
                    token_annotations={"peaks": peaks})  # fmt: skip


def test_value_gradient_and_metrics_by_hand():
    """Hbar 0.35 at collection, anchor 0.25: 2 (0.1)^2, and 2 * 2 * 0.1 for Hbar, whose peaks weigh 1/4 each."""
    method, advantages = SIREN(weight=2.0, quantile=1 / 3, anchor=0.25), torch.randn(3, 5)
    shaped = method.modify_advantages(advantages, collected())
    assert shaped.advantages is advantages
    assert shaped.token_annotations["peaks"].long().tolist() == PEAKS
    assert shaped.metrics == pytest.approx({"siren/entropy": 0.35, "siren/anchor": 0.25, "siren/peak_share": 4 / 6})
    moved = torch.tensor(ENTROPY) + 0.05  # as after an update: the distance stays that at collection
    for entropy, value in ((torch.tensor(ENTROPY), 0.02), (moved, 0.02 + 0.4 * 0.05)):
        micro = batch_in_loss(entropy, shaped.token_annotations["peaks"])
        term = method.loss(micro)
        term.backward()
        assert term.item() == pytest.approx(value)
        torch.testing.assert_close(micro.statistics["entropy"].grad, 0.4 / 4 * torch.tensor(PEAKS))


def test_the_anchor_is_the_entropy_of_the_first_batch_that_has_any():
    method = SIREN(weight=2.0, quantile=1 / 3)
    nothing = method.modify_advantages(torch.zeros(3, 5), collected(mask=[[0] * 5] * 3))
    assert nothing.metrics == {"siren/peak_share": 0.0} and method.state_dict()["anchor"] is None
    assert method.loss(batch_in_loss(ENTROPY, nothing.token_annotations["peaks"])) is None
    first = method.modify_advantages(torch.zeros(3, 5), collected())
    assert method.loss(batch_in_loss(ENTROPY, first.token_annotations["peaks"])) is None, (
        "at first there is no distance"
    )
    later = torch.tensor(ENTROPY) - 0.1
    shaped = method.modify_advantages(torch.zeros(3, 5), collected(later))
    assert shaped.metrics["siren/anchor"] == pytest.approx(0.35)
    micro = batch_in_loss(later, shaped.token_annotations["peaks"])
    term = method.loss(micro)
    term.backward()
    assert term.item() == pytest.approx(0.02)
    assert micro.statistics["entropy"].grad[0, 1].item() == pytest.approx(-0.1), (
        "gradient descent raises the entropy again"
    )
    broken = method.modify_advantages(torch.zeros(3, 5), collected(later * math.nan))
    assert (
        method.loss(batch_in_loss(later, broken.token_annotations["peaks"])) is None
        and method.state_dict()["anchor"] < 1
    )


def test_a_saved_anchor_is_taken_up_unless_the_settings_name_one():
    method = SIREN(quantile=1 / 3)
    method.modify_advantages(torch.zeros(3, 5), collected())
    state = method.state_dict()
    assert state == pytest.approx({"anchor": 0.35, "entropy": 0.35})
    for other, anchor in ((SIREN(), 0.35), (SIREN(anchor=1.0), 1.0)):
        other.load_state_dict(state)
        assert other.modify_advantages(torch.zeros(3, 5), collected()).metrics["siren/anchor"] == pytest.approx(anchor)


# ------------------------------------------------------------------------------------------------ against the square


@pytest.mark.parametrize(("context", "micro_batches"), [("windowed", 4), ("concatenated", 1)])
def test_the_gradient_of_a_step_is_that_of_the_square(tmp_path, monkeypatch, context, micro_batches):
    """Of a trainer with no other loss, at a temperature, against plain forward passes over whole episodes."""
    compute_in_float64(monkeypatch)
    model = make_model().double()
    trainer = trainer_of(
        tmp_path, model=model, context=context, temperature=0.8, per_device_train_batch_size=8 // micro_batches,
        gradient_accumulation_steps=micro_batches, **settings(weight=2.0, anchor=0.3, top_p=0.9, quantile=0.6),
    )  # fmt: skip
    give_credit(trainer, lambda batch: torch.zeros_like(batch.turn_ids, dtype=torch.float64))
    plain = make_model().double()
    loss, got = catch_step(trainer)

    means = []
    for episode in filter(lambda episode: episode.is_usable, make_episodes()):
        past, found = [], []
        for turn in episode.turns:
            ids = torch.tensor([*(past if context == "concatenated" else []), *turn.prompt_ids, *turn.response_ids])
            past = ids.tolist()
            found.append(top_p_entropy(plain(ids[None]).logits[0, :-1] / 0.8, 0.9)[-len(turn.response_ids) :])
        entropies = torch.cat(found)
        chosen = peak_tokens(entropies.detach()[None], torch.ones(1, len(entropies)), 0.6)[0]
        means.append(entropies[chosen].mean())
    assert len(means) == 7
    square = 2.0 * (sum(means) / 7 - 0.3) ** 2
    square.backward()
    assert loss.item() == pytest.approx(square.item(), rel=1e-6) and square > 0.1
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    assert difference(wanted, got) < 1e-6 * largest(wanted)


# -------------------------------------------------------------------------------------------------- in the trainers


@pytest.mark.slow
@pytest.mark.parametrize("saved_at", [1, 3])
def test_a_resumed_run_has_the_anchor_of_its_first_batch(tmp_path, saved_at):
    """Two updates on each batch: one checkpoint lies in the middle of the first batch."""
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "learning_rate": 0.05}
    given |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    given |= settings(weight=50.0) | {"trust_checkpoint": True}
    straight = trainer_of(tmp_path / "run", **given)
    straight.train()
    resumed = trainer_of(tmp_path / "resumed", **given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{saved_at}"))
    assert_bit_equal(weights(straight), weights(resumed))
    for name in ("siren/entropy", "siren/anchor", "siren/peak_share"):
        assert logged(straight, name) == logged(resumed, name) and len(logged(straight, name)) == 2
    entropies, anchors = logged(straight, "siren/entropy"), logged(straight, "siren/anchor")
    assert anchors == [entropies[0]] * len(anchors) and entropies[1] != entropies[0]
    without = trainer_of(tmp_path / "without", **{**given, **settings(weight=0.0)})
    without.train()
    assert logged(without, "siren/anchor") == anchors and difference(weights(without), weights(straight)) > 1e-3
