"""SIREN: peaks and term by hand, the square's gradient, the anchor, and runs that go on from a checkpoint."""

import math
from dataclasses import replace

import pytest
import torch
from method_batches import batch_of, check_two_ranks, micro_of
from run_kit import assert_bit_equal, logged, weights
from trainer_kit import (
    catch_step,
    compute_in_float64,
    difference,
    give_credit,
    largest,
    make_episodes,
    make_model,
    make_ppo,
    make_trainer,
    saved,
    with_episodes,
)

from epo_trl.methods.siren import SIREN, peak_tokens, top_p_entropy
from epo_trl.types import StopReason

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


@pytest.mark.parametrize("quantile", [0.5, 0.8, 0.95])
def test_they_are_the_tokens_above_torchs_quantile(quantile):
    torch.manual_seed(0)
    entropy, mask = torch.rand(40, 31), torch.rand(40, 31) < torch.rand(40, 1)
    mask[:, :2] = True
    at = entropy.masked_fill(~mask, math.nan).nanquantile(quantile, dim=1, keepdim=True)
    assert torch.equal(peak_tokens(entropy, mask, quantile), mask & (entropy > at))


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


def test_two_ranks_have_one_mean_and_one_anchor():
    """Two calls: the first sets the anchor, here for one rank and for two."""
    for cut in (3, 4):
        method = SIREN(quantile=0.5)
        check_two_ranks(method, cut=cut)
        assert 0.2 < method.state_dict()["anchor"] < 1


# ------------------------------------------------------------------------------------------------ against the square


def test_its_gradient_is_that_of_the_square_by_finite_differences():
    """Four micro-batches of two episodes: the parts add up to the square of the mean over all eight."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(8, 6, 9, dtype=torch.float64)).requires_grad_()
    turns = torch.zeros(8, 6).long()
    mask = (torch.arange(6) < torch.tensor([6, 5, 1, 6, 0, 3, 2, 6])[:, None]).long()
    method = SIREN(weight=3.0, quantile=0.5, anchor=0.2)

    def inside(z):
        return top_p_entropy(z.flatten(0, 1), 0.8).view(8, 6)

    batch = batch_of(turns.tolist(), mask=mask, statistics={"entropy": inside(logits.detach())})
    peaks = method.modify_advantages(mask, batch).token_annotations["peaks"]

    def square(z):
        means = [row[chosen].mean() for row, chosen in zip(inside(z), peaks, strict=True) if chosen.any()]
        assert len(means) == 7
        return 3.0 * (sum(means) / 7 - 0.2) ** 2

    entropy, terms = inside(logits), []
    for rows in torch.arange(8).split(2):
        micro = micro_of(turns[rows], mask=mask[rows], num_episodes=7.0, statistics={"entropy": entropy[rows]},
                         token_annotations={"peaks": peaks[rows]})  # fmt: skip
        terms.append(method.loss(micro))
    total = sum(terms)
    total.backward()
    assert total.item() == pytest.approx(square(logits.detach()).item()) and total > 0.1
    with torch.no_grad():
        for _ in range(5):
            way = torch.randn_like(logits)
            slope = (square(logits + 1e-6 * way) - square(logits - 1e-6 * way)) / 2e-6
            assert (logits.grad * way).sum().item() == pytest.approx(slope.item(), rel=1e-5)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("context", ["windowed", "concatenated"])
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


PLAIN = {"bootstrap_truncated": False}  # the episodes have no text
KINDS = {
    "grpo": (make_trainer, {}),
    "separate critic": (make_ppo, PLAIN),
    "value head": (make_ppo, {**PLAIN, "critic": "value_head"}),
    "kl too": (make_trainer, {"beta": 1e-3}),
    "two updates": (make_trainer, {"num_iterations": 2, "max_steps": 8}),
}


def give_no_advantage(trainer):
    credit = trainer.methods[trainer.args.credit]
    given = credit.credit
    credit.credit = lambda batch: replace(made := given(batch), advantages=0 * made.advantages)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_entropy_is_drawn_to_the_anchor(tmp_path, kind):
    """From below and from above."""
    make, changes = KINDS[kind]
    ends = []
    for anchor in (1.0, 3.7):
        trainer = trainer_of(
            tmp_path, make, model=saved(make_model(), tmp_path / "start"), **{"max_steps": 4, **changes},
            **settings(weight=20.0, anchor=anchor), learning_rate=3e-3,
        )  # fmt: skip
        give_no_advantage(trainer)
        trainer.train()
        ends.append(logged(trainer, "siren/entropy"))
        assert len(ends[-1]) == 4 and set(logged(trainer, "siren/anchor")) == {anchor}
        assert all(0 < share < 0.5 for share in logged(trainer, "siren/peak_share"))
    (start, *_, low), (again, *_, high) = ends
    assert start == pytest.approx(again) and 1.0 < low < start - 0.1 and start + 0.1 < high < 3.7


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


def test_a_batch_without_a_token_has_no_term(tmp_path):
    episodes = [episode for episode in make_episodes() if episode.stop is StopReason.ABORTED] * 8
    trainer = trainer_of(tmp_path, max_aborted_share=1.0, **settings(anchor=2.0))
    trainer.play = lambda tasks, **kwargs: episodes
    loss, gradients = catch_step(trainer)
    assert loss.item() == 0 and largest(gradients) == 0
