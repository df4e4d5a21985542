"""What TRL logs of our episodes: hand numbers, and forwards of each turn alone."""

import math
from dataclasses import replace
from statistics import fmean, stdev

import pytest
import torch
from plain_steps import TEMPERATURE, plain_tokens
from run_kit import logged
from trainer_kit import (
    GROUP,
    ROWS,
    catch_step,
    give_credit,
    make_episodes,
    make_model,
    make_trainer,
    saved,
    with_episodes,
)


def test_rewards_and_lengths_by_hand(tmp_path):
    """The members of the second group are paid 1 each. Rows 0 and 3 end with the token that ends a response, and the
    row of the aborted episode, which counts with a length of 0 and a prompt of one token, does too."""
    trainer = make_trainer(tmp_path, max_steps=1)
    (end,) = trainer.eos_token_ids
    episodes = make_episodes()
    for row, episode in enumerate(episodes):
        *turns, last = episode.turns
        if row in (0, 3):
            last = replace(last, response_ids=(*last.response_ids[:-1], end))
        if row >= GROUP:
            last = replace(last, reward=1.0)
        episodes[row] = replace(episode, turns=(*turns, last))
    trainer.play = lambda tasks, **kwargs: episodes
    trainer.train()
    returns = [10.0, -0.1, 0.0, 9.8, 1.0, 1.0, 1.0]
    wanted = {
        "reward": fmean(returns), "reward_std": stdev(returns), "frac_reward_zero_std": 0.5,
        "rewards/episode_return/mean": fmean(returns), "rewards/episode_return/std": stdev(returns),
        "completions/mean_length": 39 / 8, "completions/min_length": 0, "completions/max_length": 12,
        "completions/clipped_ratio": 5 / 8, "completions/mean_terminated_length": (8 + 4 + 0) / 3,
        "completions/min_terminated_length": 0, "completions/max_terminated_length": 8,
        "num_tokens": 4 * 5 + 3 * 9 + 1 + 39,
    }  # fmt: skip
    line = trainer.state.log_history[0]
    assert {name: line[name] for name in wanted} == pytest.approx(wanted)


def test_entropy_and_divergence_are_those_of_plain_forwards(tmp_path):
    reference = saved(make_model(seed=5), tmp_path / "reference")
    model = make_model()
    model.config._name_or_path = str(tmp_path / "reference")
    trainer = with_episodes(make_trainer(tmp_path, model=model, temperature=TEMPERATURE, beta=0.05, epo_lambda=0.0))
    catch_step(trainer)
    with torch.no_grad():
        own, theirs = (plain_tokens(one, "windowed") for one in (make_model(), reference))
    assert logged(trainer, "entropy") == [pytest.approx(fmean(token.entropy for token in own), rel=1e-5)]
    gaps = [float(other.logp - token.logp) for token, other in zip(own, theirs, strict=True)]
    assert logged(trainer, "kl") == [pytest.approx(fmean(math.exp(gap) - gap - 1 for gap in gaps), rel=1e-4)]


def test_loss_and_length_of_the_gradient_are_those_of_the_step(tmp_path):
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    trainer = with_episodes(make_trainer(tmp_path, epo_lambda=0.5, **cut))
    loss, gradients = catch_step(trainer)
    length = sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
    assert logged(trainer, "loss") == [pytest.approx(loss.item(), rel=1e-5)]
    assert logged(trainer, "grad_norm") == [pytest.approx(length, rel=1e-5)]


def test_shares_of_clipped_tokens_by_hand(tmp_path):
    """Advantages are 1, -1, 1, ...; the ratio is e^0.5 in the first group and e^-0.5 in the second.

    Too high are the 8 + 12 tokens of rows 0 and 2, too low the 6 of row 7; row 5 is aborted.
    """
    trainer = with_episodes(make_trainer(tmp_path, temperature=TEMPERATURE, epo_lambda=0.0))
    give_credit(trainer, lambda batch: (-1.0) ** torch.arange(ROWS)[:, None] * batch.mask)
    with torch.no_grad():
        tokens = plain_tokens(make_model(), "windowed")
    collect = trainer._generate_and_score_completions

    def stale(inputs):
        output = collect(inputs)
        old = torch.zeros(output["completion_mask"].shape)
        mask = (output["completion_mask"] * output["tool_mask"]).bool()
        old[mask] = torch.tensor([float(one.logp) - (0.5 if one.row < GROUP else -0.5) for one in tokens])
        return output | {"old_per_token_logps": old}

    trainer._generate_and_score_completions = stale
    catch_step(trainer)
    wanted = {"high_mean": 20 / 39, "high_max": 1.0, "low_mean": 6 / 39, "low_min": 0.0, "region_mean": 26 / 39}
    assert {name: logged(trainer, f"clip_ratio/{name}")[0] for name in wanted} == pytest.approx(wanted)
