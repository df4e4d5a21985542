"""What TRL logs of our episodes: hand numbers, and forwards of each turn alone."""

import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from fused_heads import make_mixture
from plain_steps import TEMPERATURE, plain_tokens
from run_kit import logged
from trainer_kit import (
    GROUP,
    ROWS,
    catch_step,
    difference,
    give_credit,
    largest,
    make_episodes,
    make_model,
    make_trainer,
    saved,
    with_episodes,
)


def test_entropy_and_divergence_are_those_of_plain_forwards(tmp_path):
    reference, model = make_model(seed=5), saved(make_model(), tmp_path / "start")
    trainer = with_episodes(make_trainer(tmp_path, model=model, temperature=TEMPERATURE, beta=0.05, epo_lambda=0.0))
    trainer.ref_model.load_state_dict(reference.state_dict())
    catch_step(trainer)
    with torch.no_grad():
        own, theirs = (plain_tokens(one, "windowed") for one in (make_model(), reference))
    assert logged(trainer, "entropy") == [pytest.approx(fmean(token.entropy for token in own), rel=1e-5)]
    gaps = [float(other.logp - token.logp) for token, other in zip(own, theirs, strict=True)]
    assert logged(trainer, "kl") == [pytest.approx(fmean(math.exp(gap) - gap - 1 for gap in gaps), rel=1e-4)]


def sampled_elsewhere(folder, **changes):
    """Returns a trainer whose sampler's log-probs are off: lower by 0.5 in the first group, higher by 1 in rows 4 and
    6, lower by 2 in row 7. Row 5 is aborted.
    """
    with torch.no_grad():
        own = {}
        for token in plain_tokens(make_model(), "windowed"):
            own.setdefault((token.row, token.turn), []).append(float(token.logp))
    gaps = {**dict.fromkeys(range(GROUP), 0.5), 4: -1.0, 6: -1.0, 7: 2.0}
    episodes = make_episodes()
    for row, gap in gaps.items():
        turns = [
            replace(turn, logprobs=tuple(logp - gap for logp in own[row, t]))
            for t, turn in enumerate(episodes[row].turns)
        ]
        episodes[row] = replace(episodes[row], turns=tuple(turns))
    trainer = with_episodes(make_trainer(folder, temperature=TEMPERATURE, epo_lambda=0.0, **changes), episodes)
    trainer.use_vllm, trainer._last_loaded_step = True, 0  # as if vLLM had these weights
    return trainer


def test_a_term_made_of_the_policy_mean_has_the_correction_of_trls_policy_loss(tmp_path):
    """`PolicyLossAsTerm` is TRL's policy loss, whose ratios are 1, and so its tokens have the sampler's weights."""
    (loss, gradients), (as_term, again) = (
        catch_step(sampled_elsewhere(tmp_path, policy_method=method))
        for method in (None, "method_examples:PolicyLossAsTerm")
    )
    assert float(as_term) == pytest.approx(float(loss), abs=1e-6)
    assert difference(gradients, again) < 1e-5 * largest(gradients)


def test_the_policy_loss_by_hand_and_the_loss_with_trls_bonus(tmp_path):
    """Advantages are 1, -2, 3, ...; rows have 8, 2, 12, 4, 6, 0 (aborted), 1 and 6 tokens; each ratio is 1."""
    trainer = with_episodes(make_trainer(tmp_path, temperature=TEMPERATURE, epo_lambda=0.0, entropy_coef=0.25))
    rows = torch.arange(ROWS)
    give_credit(trainer, lambda batch: ((-1.0) ** rows * (rows + 1))[:, None] * batch.mask)
    catch_step(trainer)
    policy_loss = -(8 - 2 * 2 + 3 * 12 - 4 * 4 + 5 * 6 + 7 * 1 - 8 * 6) / 39
    with torch.no_grad():
        entropy = fmean(token.entropy for token in plain_tokens(make_model(), "windowed"))
    assert logged(trainer, "policy_loss") == [pytest.approx(policy_loss, rel=1e-5)]
    assert logged(trainer, "loss") == [pytest.approx(policy_loss - 0.25 * entropy, rel=1e-4)]


def test_the_balance_of_experts_is_that_of_each_turn_alone(tmp_path):
    """Reference: 4 experts x the sum of (share of tokens that an expert gets) x (its mean probability)."""
    model = make_mixture()
    with torch.no_grad():
        rows = [
            torch.tensor([[*turn.prompt_ids, *turn.response_ids]])
            for episode in make_episodes() if episode.is_usable for turn in episode.turns
        ]  # fmt: skip
        seen = [torch.stack(model(row, output_router_logits=True).router_logits) for row in rows]
    probabilities = torch.cat(seen, dim=1).flatten(0, 1).softmax(-1)  # (layers x tokens, experts)
    chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(2).indices, 1.0)
    wanted = 4 * float((chosen.mean(0) * probabilities.mean(0)).sum())
    trainer = with_episodes(make_trainer(tmp_path, model=model, epo_lambda=0.0))
    catch_step(trainer)
    assert logged(trainer, "aux_loss") == [pytest.approx(wanted, rel=1e-5)]
