"""The bonus inside the first policy's nucleus: by hand, against plain softmaxes, and with a reference that stays."""

import math

import pytest
import torch
from fused_heads import disturbed, head_of, nucleus_entropy_of
from method_batches import micro_of
from run_kit import assert_bit_equal, logged, weights
from trainer_kit import (
    catch_step,
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

from epo_trl.methods import StepSummary, lm_head
from epo_trl.methods.ref_nucleus import ReferenceNucleus, nucleus, nucleus_entropy
from epo_trl.trainers.monitoring.run_health import watched_entropy

NO = -1


# --------------------------------------------------------------------------------------------------------- by hand


def test_the_nucleus_by_hand(monkeypatch):
    """More than 5 %, most probable first; a position with one such token, or none, has no choice."""
    head, _ = head_of([[0.08, 0.6, 0.02, 0.3], [0.04, 0.9, 0.03, 0.03], [0.5, 0.04, 0.4599, 0.0001]])
    monkeypatch.setattr(lm_head, "CHUNK", 4)  # one position at a time
    assert nucleus(head, 0.05).tolist() == [[1, 3, 0, NO], [NO] * 4, [0, 2, NO, NO]]
    assert nucleus(head, 0.31).tolist() == [[NO] * 3, [NO] * 3, [0, 2, NO]]  # there is room for three at most


def test_its_entropy_and_gradient_by_hand():
    """Among 0.6 and 0.3 they are 2/3 and 1/3; what the third token has does not matter. dN/dz = -q (ln q + N)."""
    head, logits = head_of([[0.6, 0.3, 0.1], [0.9, 0.05, 0.05], [0.2, 0.3, 0.5]])
    entropy = nucleus_entropy(head, torch.tensor([[0, 1], [NO, NO], [2, 0]]))
    first, third = math.log(3) - 2 / 3 * math.log(2), -(5 / 7 * math.log(5 / 7) + 2 / 7 * math.log(2 / 7))
    assert entropy.tolist() == pytest.approx([first, 0.0, third])
    entropy.sum().backward()
    push = [-q * (math.log(q) + first) for q in (2 / 3, 1 / 3)]
    assert logits.grad[0].tolist() == pytest.approx([*push, 0.0])
    assert sum(push) == pytest.approx(0.0)
    assert logits.grad[1].tolist() == [0.0] * 3, "a forced token has no gradient"


def row_of(entropy, inside, choice, **changes):
    """Returns a micro-batch of one turn of sampled tokens and a last token that does not count."""
    entropy, inside = (torch.tensor([[*x, 9.0]], requires_grad=True) for x in (entropy, inside))
    marks = {"candidates": torch.tensor([[[5, 6] if x else [NO, NO] for x in (*choice, True)]])}
    ids = [[*(0 for _ in choice), -1]]
    return micro_of(ids, entropy=entropy, statistics={"entropy": inside}, token_annotations=marks, **changes)


def test_the_term_and_its_metrics_by_hand():
    """Four tokens, two of them with a choice: 0.5 * (0.6 + 0.2) / 4."""
    method = ReferenceNucleus(weight=0.5)
    term = method.loss(row_of([1.0, 2.0, 0.1, 0.5], [0.6, 0.2, 0.0, 0.0], [True, True, False, False]))
    assert term.item() == pytest.approx(-0.5 * 0.8 / 4)
    assert method.end_rl_step(StepSummary(1.0, {})) == pytest.approx(
        {
            "ref-nucleus/weight": 0.5,
            "ref-nucleus/choice_share": 0.5,
            "ref-nucleus/entropy": 0.4,
            "ref-nucleus/choice_entropy": 1.5,
            "ref-nucleus/forced_entropy": 0.3,
        }
    )
    assert method.end_rl_step(StepSummary(1.0, {}))["ref-nucleus/entropy"] == 0.0, "the sums begin anew"


def test_a_batch_without_a_choice_logs_no_entropy_of_choices():
    """An entropy of 0 would be a collapse, to the trainer and to a study that reads its log."""
    method = ReferenceNucleus()
    method.loss(row_of([1.0, 0.1], [0.0, 0.0], [False, False]))
    found = method.end_rl_step(StepSummary(1.0, {}))
    assert found["ref-nucleus/choice_share"] == 0.0 and "ref-nucleus/choice_entropy" not in found
    assert math.isnan(watched_entropy({**found, "entropy/all_tokens": 0.5}))


def test_the_weight_follows_its_schedule_down_to_nothing():
    method = ReferenceNucleus(weight=0.4, schedule="linear", end_weight=0.0)
    terms = [
        method.loss(row_of([1.0], [0.5], [True], rl_step=step, total_rl_steps=5)) for step in (0, 1, 4)
    ]  # fmt: skip
    assert [None if term is None else round(term.item(), 6) for term in terms] == [-0.2, -0.15, None]


# -------------------------------------------------------------------------------------------------- in the trainers


def settings(weight=0.5, **more):
    return {"epo_lambda": 0.0, "entropy_method": ["ref-nucleus"],
            "method_kwargs": {"ref-nucleus": {"weight": weight, **more}}}  # fmt: skip


def trainer_of(folder, make=make_trainer, **changes):
    return with_episodes(make(folder, **{**settings(), **changes}))


@pytest.mark.parametrize(
    ("context", "passes"),
    [("windowed", {"tokens_per_pass": 40, "recompute_passes": True}), ("concatenated", {})],
)
def test_the_gradient_of_a_step_is_that_of_the_mean_of_means(tmp_path, context, passes):
    """No advantage, a policy that has moved away from the reference, micro-batches of two."""
    trainer = trainer_of(
        tmp_path, context=context, temperature=0.8, per_device_train_batch_size=2, gradient_accumulation_steps=4,
        **settings(cut=0.05), **passes,
    )  # fmt: skip
    give_credit(trainer, lambda batch: torch.zeros_like(batch.turn_ids, dtype=torch.float32))
    trainer.model.load_state_dict(disturbed(trainer.model).state_dict())
    model, reference = (saved(x, tmp_path / str(i)) for i, x in enumerate((trainer.model, trainer.ref_model)))
    loss, got = catch_step(trainer)

    term = torch.zeros((), dtype=torch.float64)
    usable = [episode for episode in make_episodes() if episode.is_usable]
    for episode in usable:
        past: list[int] = []
        for turn in episode.turns:
            ids = torch.tensor([*(past if context == "concatenated" else []), *turn.prompt_ids, *turn.response_ids])
            past = ids.tolist()
            logits, others = (one(ids[None]).logits[0, :-1].double() / 0.8 for one in (model, reference))
            entropies = nucleus_entropy_of(logits, others.detach(), 0.05)[-len(turn.response_ids) :]
            term = term + entropies.mean() / len(episode.turns) / len(usable)
    (-0.5 * term).backward()
    assert loss.item() == pytest.approx(-0.5 * term.item(), rel=1e-4) and term > 0.05
    wanted = {name: p.grad for name, p in model.named_parameters()}
    assert difference(wanted, got) < 1e-4 * largest(wanted)


def lora(**settings):
    from peft import LoraConfig

    return LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)


def loaded_adapter(folder):
    from peft import get_peft_model

    torch.manual_seed(0)
    return get_peft_model(saved(make_model(), folder / "start"), lora(init_lora_weights=False))


PLAIN = {"bootstrap_truncated": False}  # the episodes have no text
KINDS = {
    "all weights": (make_trainer, lambda folder: {}),
    "new adapter": (make_trainer, lambda folder: {"peft_config": lora()}),
    "loaded adapter": (make_trainer, lambda folder: {"model": loaded_adapter(folder)}),
    "separate critic": (make_ppo, lambda folder: PLAIN),
    "value head": (make_ppo, lambda folder: {**PLAIN, "critic": "value_head"}),
    "value head, adapter": (make_ppo, lambda folder: {**PLAIN, "critic": "value_head", "peft_config": lora()}),
    "kl too": (make_trainer, lambda folder: {"beta": 0.1}),
    "two updates": (make_trainer, lambda folder: {"num_iterations": 2}),
}


@torch.no_grad()
def nucleus_of(trainer, batch):
    """Returns the candidates that the policy of this moment would give."""
    rows = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    return trainer.scorer.reference(trainer.model, rows, trainer.step.layout)["ref-nucleus/candidates"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_stays_where_the_policy_began(tmp_path, kind):
    make, changes = KINDS[kind]
    trainer = trainer_of(tmp_path, make, max_steps=4, **changes(tmp_path))
    beta = 0.1 if kind == "kl too" else 0.0
    assert trainer.beta == trainer.args.beta == beta
    collect, batches, own = trainer._generate_and_score_completions, [], []

    def look(inputs):
        batch = collect(inputs)
        batches.append(trainer.step.annotations["ref-nucleus"]["candidates"])
        own.append(nucleus_of(trainer, batch))
        return batch

    trainer._generate_and_score_completions = look
    before = weights(trainer)
    trainer.train()
    first, last = batches[0], batches[-1]
    assert torch.equal(first, last) and (first >= 0).any(-1).sum() > 5
    assert torch.equal(first, own[0]), "at first the policy is the reference"
    assert first.shape != own[-1].shape or not torch.equal(first, own[-1]), "later it would choose from others"
    assert difference(before, weights(trainer)) > 1e-3
    assert (len(logged(trainer, "kl")) > 0) == bool(beta)
    entropies = logged(trainer, "ref-nucleus/entropy")
    assert entropies[0] > 0.1 and len({*entropies}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["new adapter", "loaded adapter"])
def test_a_resumed_run_of_an_adapter_is_the_same_bit_for_bit(tmp_path, kind):
    """In the middle of a collected batch. The checkpoint's policy is not the reference, the first one is."""
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3, "learning_rate": 0.05, "trust_checkpoint": True,
             "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 8}  # fmt: skip
    straight = trainer_of(tmp_path / "run", **given, **KINDS[kind][1](tmp_path))
    straight.train()
    resumed = trainer_of(tmp_path / "resumed", **given, **KINDS[kind][1](tmp_path))
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert_bit_equal(weights(straight), weights(resumed))
    for name in ("ref-nucleus/entropy", "ref-nucleus/choice_share"):
        assert logged(straight, name)[-1] == logged(resumed, name)[-1]


def test_without_such_a_method_there_is_no_reference(tmp_path):
    assert make_trainer(tmp_path).ref_model is None and make_ppo(tmp_path).ref_model is None
