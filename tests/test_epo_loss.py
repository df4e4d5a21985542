"""EPOTrainer's loss and gradient against arXiv 2509.22576 in plain loops, and against themselves however cut.

The gradients are those of a real `trainer.train()`, caught before the optimizer step. A Llama "in float64" still goes
through float32 in its norms, its rotary angles and TRL's fused head; there the differences are about 1e-7. With these
three computed in float64 as well (`exact`) nothing but our own arithmetic is left, and 1e-11 is asked for.

Notation: H entropy of a token, A advantage, lambda `epo_lambda`, k RL step, K RL steps of the run.
"""

import math
import random
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from trainer_kit import (
    GROUP,
    ROWS,
    catch_step,
    compute_in_float64,
    difference,
    give_credit,
    largest,
    make_config,
    make_episode,
    make_episodes,
    make_model,
    make_trainer,
    one_batch,
    saved,
    toy_tokenizer,
    with_episodes,
)
from trl import GRPOConfig, GRPOTrainer

from epo_trl.rollout import episode_to_row
from epo_trl.types import StopReason

F64 = torch.float64
HISTORY = [3.4, 3.2]
REFERENCE = 3.3
BAND = {"kappa_low": 0.97, "kappa_high": 1.045}  # the tokens of `make_episodes` fall below, inside and above
EPO = {"epo_lambda": 0.3, "smoothing_alpha": 0.7, **BAND}
RL_STEP, TOTAL = 3, 10
BETA_K = 2.0 + (1.0 - 2.0) * (1.0 - math.exp(-3.0 * 3 / 5))  # Eq. 7 with K = 10, k = 3 <= k_mid = 5
CONTEXTS = ("windowed", "concatenated")
TOLERANCE = {"trl": 1e-6, "exact": 1e-11}


@pytest.fixture(params=TOLERANCE)
def tolerance(request, monkeypatch):
    """Runs a test with TRL's own head and once more in float64 throughout."""
    if request.param == "exact":
        compute_in_float64(monkeypatch)
    return TOLERANCE[request.param]


def trainer_with(tmp_path, episodes, *, micro_batches=1, model=None, **changes):
    trainer = make_trainer(
        tmp_path,
        model=model if model is not None else make_model().double(),
        per_device_train_batch_size=ROWS // micro_batches,
        gradient_accumulation_steps=changes.pop("gradient_accumulation_steps", micro_batches),
        **{**EPO, "max_steps": TOTAL, **changes},
    )
    return with_episodes(trainer, episodes)


def step_of(trainer):
    return catch_step(trainer, history=HISTORY, rl_step=RL_STEP)


def group_advantages(episodes):
    """GRPO: (r - mean) / (std + 1e-4) over the usable members of each group, std with n - 1."""
    advantages = []
    for start in range(0, len(episodes), GROUP):
        group = episodes[start : start + GROUP]
        rewards = [sum(turn.reward for turn in e.turns) for e in group if e.stop is not StopReason.ABORTED]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        for e in group:
            total = sum(turn.reward for turn in e.turns)
            advantages.append(0.0 if e.stop is StopReason.ABORTED else (total - mean) / (std + 1e-4))
    return advantages


# --------------------------------------------------------------------------------------- the reference, in plain loops


def distributions(model, episode, context, temperature=1.0):
    """Returns, for each turn and each sampled token, `(log-prob of the token, entropy)`, by plain forwards."""
    result, before = [], []
    for turn in episode.turns:
        before = list(turn.prompt_ids) if context == "windowed" else before + list(turn.prompt_ids)
        sequence = before + list(turn.response_ids)
        logits = model(torch.tensor([sequence])).logits[0] / temperature
        tokens = []
        for i, token in enumerate(turn.response_ids):
            log_p = logits[len(before) + i - 1].log_softmax(-1)
            tokens.append((log_p[token], -(log_p.exp() * log_p).sum()))
        result.append(tokens)
        before = sequence
    return result


def reference_loss(
    model, episodes, advantages, *, context, coef, alpha, beta_k, low, high, reference, old=None, kl=0.0, kl_model=None,
    temperature=1.0,
):  # fmt: skip
    """L = L_MT - lambda * (L_H - beta_k * L_smooth), read from the paper; L_MT with TRL's "dapo" normaliser."""
    policy, count, bonuses, penalties = torch.zeros((), dtype=F64), 0, [], []
    for j, episode in enumerate(episodes):
        if episode.stop is StopReason.ABORTED:
            continue
        turns = distributions(model, episode, context, temperature)
        with torch.no_grad():
            base = distributions(kl_model, episode, context, temperature) if kl else None
        turn_bonus, turn_penalty = [], []
        for t, tokens in enumerate(turns):
            entropies, penalty = [], []
            for i, (log_p, entropy) in enumerate(tokens):
                # L_MT: min(ratio * A, clip(ratio) * A), one sum over the tokens of the batch
                ratio = (log_p - (old[j][t][i] if old else log_p.detach())).exp()
                advantage = advantages[j] if isinstance(advantages[j], float) else advantages[j][t]
                surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                policy = policy - surrogate
                if kl:
                    gap = base[t][i][0] - log_p
                    policy = policy + kl * ratio * (gap.exp() - gap - 1)  # TRL corrects it for stale tokens
                count += 1
                # Eq. 5
                centre = reference[t] if isinstance(reference, dict) else reference
                entropies.append(entropy)
                penalty.append(
                    alpha * (torch.relu(low * centre - entropy) + torch.relu(entropy - high * centre))
                    if centre is not None
                    else 0.0 * entropy
                )
            turn_bonus.append(sum(entropies) / len(entropies))
            turn_penalty.append(sum(penalty) / len(penalty))
        bonuses.append(sum(turn_bonus) / len(turn_bonus))  # Eq. 4
        penalties.append(sum(turn_penalty) / len(turn_penalty))  # Eq. 6
    bonus, smooth = sum(bonuses) / len(bonuses), sum(penalties) / len(penalties)
    return policy / count - coef * (bonus - beta_k * smooth)


def with_gradients(model, loss):
    model.zero_grad()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients


def assert_same(got, expected, tolerance):
    assert abs(float(got[0]) - float(expected[0])) < tolerance
    assert difference(got[1], expected[1]) < tolerance
    assert largest(expected[1]) > 0.01, "gradients that vanish agree with anything"


def plain(context, **changes):
    settings = {
        "context": context, "coef": 0.3, "alpha": 0.7, "beta_k": BETA_K, "low": BAND["kappa_low"],
        "high": BAND["kappa_high"], "reference": REFERENCE,
    }  # fmt: skip
    return {**settings, **changes}


def test_the_episodes_of_these_tests_have_tokens_below_inside_and_above_the_band():
    model = make_model().double()
    low, high = BAND["kappa_low"] * REFERENCE, BAND["kappa_high"] * REFERENCE
    entropies = [h.item() for e in make_episodes() for turn in distributions(model, e, "windowed") for _, h in turn]
    assert (
        min(sum(h < low for h in entropies), sum(low < h < high for h in entropies), sum(h > high for h in entropies))
        >= 3
    )


@pytest.mark.parametrize("context", CONTEXTS)
def test_loss_and_gradient_are_those_of_the_equations(tmp_path, tolerance, context):
    episodes = make_episodes()
    trainer = trainer_with(tmp_path, episodes, micro_batches=2, context=context)
    advantages = group_advantages(episodes)
    if tolerance < 1e-6:  # TRL's advantages are float32
        give_credit(trainer, lambda batch: torch.tensor(advantages, dtype=F64).unsqueeze(1) * batch.mask)
    got = step_of(trainer)
    model = make_model().double()
    expected = with_gradients(model, reference_loss(model, episodes, advantages, **plain(context)))
    assert_same(got, expected, tolerance)


@pytest.mark.parametrize("context", CONTEXTS)
def test_clipped_ratios_credit_per_turn_temperature_and_kl(tmp_path, monkeypatch, context):
    """The whole loss: stale log-probs of which some are clipped, advantages per turn, temperature, KL."""
    compute_in_float64(monkeypatch)
    episodes, rng = make_episodes(1), random.Random(0)
    other = make_model(seed=5)
    plain_model, kl_model = (make_model().double() for _ in range(2))
    kl_model.load_state_dict(other.state_dict())
    model = saved(make_model().double(), tmp_path / "start")
    per_turn = [[a * (1 + t) for t in range(4)] for a in group_advantages(episodes)]
    with torch.no_grad():
        old = [
            [
                [float(log_p) + rng.uniform(-0.5, 0.5) for log_p, _ in turn]
                for turn in distributions(plain_model, e, context, 0.8)
            ]
            for e in episodes
        ]
    trainer = trainer_with(
        tmp_path, episodes, model=model, micro_batches=4, context=context, temperature=0.8, beta=0.05
    )
    trainer.ref_model.load_state_dict(other.state_dict())
    flat_old, flat_advantage = torch.zeros(ROWS, 40, dtype=F64), torch.zeros(ROWS, 40, dtype=F64)
    for j, episode in enumerate(episodes):
        row = episode_to_row(episode, 0)
        if episode.is_usable:
            mask = torch.tensor(row.env_mask).bool()
            flat_old[j, : len(mask)][mask] = torch.tensor([x for turn in old[j] for x in turn], dtype=F64)
            flat_advantage[j, : len(mask)] = torch.tensor([per_turn[j][t] for t in row.turn_ids], dtype=F64)
    give_credit(trainer, lambda batch: flat_advantage[:, : batch.turn_ids.shape[1]] * batch.mask)
    original = trainer._generate_and_score_completions

    def with_old(inputs):
        output = original(inputs)
        return output | {"old_per_token_logps": flat_old[:, : output["completion_ids"].shape[1]]}

    trainer._generate_and_score_completions = with_old
    got = step_of(trainer)
    assert trainer.state.log_history[0]["clip_ratio/region_mean"] > 0.1
    assert trainer.state.log_history[0]["kl"] > 0.1
    loss = reference_loss(
        plain_model, episodes, per_turn, old=old, kl=0.05, kl_model=kl_model, temperature=0.8, **plain(context)
    )
    assert_same(got, with_gradients(plain_model, loss), 1e-11)


def test_a_history_per_turn_has_its_own_reference_for_each_turn(tmp_path, monkeypatch):
    compute_in_float64(monkeypatch)
    episodes = make_episodes()
    trainer = trainer_with(tmp_path, episodes, entropy_history="turn")
    advantages = group_advantages(episodes)
    give_credit(trainer, lambda batch: torch.tensor(advantages, dtype=F64).unsqueeze(1) * batch.mask)
    references = {0: 3.5, 1: 3.25, 2: 3.375}  # exact in float32; turn 3 was never reached before
    trainer.methods["epo"].history.append(references)
    trainer.rl_step = RL_STEP
    got = catch_step(trainer)
    model = make_model().double()
    settings = plain("windowed", reference={**references, 3: None})
    expected = with_gradients(model, reference_loss(model, episodes, advantages, **settings))
    assert_same(got, expected, 1e-11)


def test_at_the_first_rl_step_there_is_no_smoothing(tmp_path):
    episodes = make_episodes()
    got = catch_step(trainer_with(tmp_path, episodes))
    without = catch_step(trainer_with(tmp_path, episodes, smoothing_alpha=0.0))
    assert_same(got, without, 1e-12)
    assert difference(got[1], step_of(trainer_with(tmp_path, episodes))[1]) > 1e-3


# ------------------------------------------------------------------------------------------------- cuts, padding, order


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS)
def test_loss_and_gradient_do_not_depend_on_cut_padding_or_order(tmp_path, tolerance, context):
    """Every trainer seed shuffles the rows differently; with 8 micro-batches one holds nothing but an aborted row."""
    episodes = make_episodes()
    whole = step_of(trainer_with(tmp_path, episodes, context=context))
    for micro_batches in (2, 4, 8):
        cut = trainer_with(tmp_path, episodes, micro_batches=micro_batches, context=context, seed=micro_batches)
        assert_same(step_of(cut), whole, tolerance)
    padded = trainer_with(tmp_path, episodes, micro_batches=2, context=context, pad_to_multiple_of=64, seed=1)
    assert_same(step_of(padded), whole, tolerance)
    swapped = [*reversed(episodes[GROUP:]), *reversed(episodes[:GROUP])]
    # TRL sums a group's rewards in float32, in their order
    assert_same(step_of(trainer_with(tmp_path, swapped, context=context, seed=3)), whole, max(tolerance, 1e-7))


def test_two_optimizer_steps_on_one_batch_average_to_one_step_on_it(tmp_path, monkeypatch):
    """steps_per_generation 4, gradient_accumulation_steps 2: each optimizer step sees half of the trajectories."""
    compute_in_float64(monkeypatch)
    whole = step_of(trainer_with(tmp_path, make_episodes()))
    trainer = trainer_with(
        tmp_path, make_episodes(), micro_batches=4, gradient_accumulation_steps=2, steps_per_generation=4, max_steps=20
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    trainer.state.max_steps = 20
    trainer.rl_step = RL_STEP
    for entropy in HISTORY:
        trainer.methods["epo"].history.append(entropy)
    losses = []
    for _ in range(4):
        losses.append(trainer.compute_loss(trainer.model, trainer._prepare_inputs(one_batch())))
        losses[-1].backward()
        trainer._step += 1
    halves = {name: p.grad / 2 for name, p in trainer.model.named_parameters()}
    assert_same((sum(losses).detach() / 2, halves), whole, 1e-11)


def test_rows_that_mask_truncated_completions_clears_count_nowhere(tmp_path, monkeypatch):
    """An episode whose last response was cut is left out of all means, its tokens see what they saw."""
    compute_in_float64(monkeypatch)
    eos, cut = toy_tokenizer().eos_token_id, {0, 3, 6}
    episodes = make_episodes()
    for j, e in enumerate(episodes):
        if j not in cut:
            last = replace(e.turns[-1], response_ids=(*e.turns[-1].response_ids, eos))
            episodes[j] = replace(e, turns=(*e.turns[:-1], last))
    trainer = trainer_with(tmp_path, episodes, micro_batches=2, mask_truncated_completions=True)
    advantages = group_advantages(episodes)
    give_credit(trainer, lambda batch: torch.tensor(advantages, dtype=F64).unsqueeze(1) * batch.mask)
    got = step_of(trainer)
    kept = [replace(e, stop=StopReason.ABORTED) if j in cut else e for j, e in enumerate(episodes)]
    model = make_model().double()
    assert_same(got, with_gradients(model, reference_loss(model, kept, advantages, **plain("windowed"))), 1e-11)


def test_a_batch_of_nothing_but_aborted_episodes_moves_nothing(tmp_path):
    rng = random.Random(0)
    episodes = [make_episode([(3, 2)], 1.0, rng, stop=StopReason.ABORTED) for _ in range(ROWS)]
    trainer = trainer_with(tmp_path, episodes, micro_batches=2, max_aborted_share=1.0)
    loss, gradients = step_of(trainer)
    assert float(loss) == 0.0 and largest(gradients) == 0.0
    assert len(trainer.methods["epo"].history) == len(HISTORY), "a step without tokens has no entropy to remember"


# ---------------------------------------------------------------------------------------------------------- TRL itself


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_without_lambda_it_is_trls_grpo_trainer(tmp_path, tolerance, micro_batches):
    episodes = make_episodes()
    ours = trainer_with(tmp_path, episodes, micro_batches=micro_batches, context="concatenated", epo_lambda=0.0)

    def rollout(prompts, trainer):
        rows = [episode_to_row(episode, toy_tokenizer().eos_token_id) for episode in episodes]
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.completion_ids for row in rows],
            "env_mask": [row.env_mask for row in rows],
            "logprobs": None,
            "total": [e.total_reward if e.is_usable else None for e in episodes],
        }

    names = set(GRPOConfig.__dataclass_fields__)
    config = make_config(
        tmp_path, per_device_train_batch_size=ROWS // micro_batches, gradient_accumulation_steps=micro_batches
    )
    settings = {n: getattr(config, n) for n in names if GRPOConfig.__dataclass_fields__[n].init}
    settings |= {"generation_batch_size": None, "num_generations_eval": None}
    theirs = GRPOTrainer(
        make_model().double(),
        lambda completions, total, **_: total,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_dict({"prompt": ["train/0"] * 100}),
        processing_class=toy_tokenizer(),
        rollout_func=rollout,
    )
    assert_same(catch_step(ours), catch_step(theirs), tolerance)


# -------------------------------------------------------------------------------------------------- finite differences


def prepared(tmp_path, **changes):
    """Returns a trainer and its one micro-batch; nothing but the entropy terms is left in the loss."""
    trainer = trainer_with(tmp_path, make_episodes(), epo_lambda=1.0, **changes)
    give_credit(trainer, lambda batch: torch.zeros(batch.turn_ids.shape, dtype=F64))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer, trainer._prepare_inputs(one_batch())


def smoothing(trainer, inputs, alpha):
    """Returns value and gradient of beta_k * L_smooth, as the loss with `alpha` minus the loss without."""
    results = []
    for value in (alpha, 0.0):
        trainer.methods["epo"].smoothing_alpha = value
        results.append(with_gradients(trainer.model, trainer.compute_loss(trainer.model, inputs)))
    (loss, gradients), (base, base_gradients) = results
    return float(loss - base), {name: gradients[name] - base_gradients[name] for name in gradients}


@pytest.mark.parametrize(
    ("reference", "outside"), [(1.0, True), (12.0, True), (3.0, False)], ids=["above", "below", "inside"]
)
def test_gradient_of_the_smoothing_term_by_finite_differences(tmp_path, monkeypatch, reference, outside):
    compute_in_float64(monkeypatch)
    trainer, inputs = prepared(tmp_path, kappa_low=0.5, kappa_high=2.0)
    trainer.methods["epo"].history.append(reference)
    value, gradients = smoothing(trainer, inputs, 0.7)
    generator = torch.Generator().manual_seed(0)
    direction = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in trainer.model.named_parameters()
    }
    analytic = sum(float((gradients[name] * direction[name]).sum()) for name in gradients)
    epsilon, sides = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            for name, p in trainer.model.named_parameters():
                p.add_(direction[name], alpha=sign * epsilon)
        sides.append(smoothing(trainer, inputs, 0.7)[0])
        with torch.no_grad():
            for name, p in trainer.model.named_parameters():
                p.sub_(direction[name], alpha=sign * epsilon)
    numeric = (sides[0] - sides[1]) / (2 * epsilon)
    if outside:
        assert value > 0.1 and abs(numeric) > 1e-2
        assert analytic == pytest.approx(numeric, rel=1e-5)
    else:
        assert value == 0.0 and numeric == 0.0 and largest(gradients) == 0.0


def test_the_indicator_changes_the_loss_and_not_the_gradient(tmp_path):
    trainer, inputs = prepared(tmp_path, smoothing_penalty="indicator")
    trainer.methods["epo"].history.append(1.0)
    value, gradients = smoothing(trainer, inputs, 0.7)
    assert value == pytest.approx(2.0 * 0.7)  # every token is above; beta_start is 2
    assert largest(gradients) == 0.0
