"""Data of an earlier policy: who plays, what the importance weights are, and that a run resumes exactly."""

import math

import pytest
import torch
from plain_steps import TEMPERATURE, plain_tokens
from run_kit import MINI_BATCHES, EachStep, StopAt, assert_bit_equal, logged, resumable, weights
from trainer_kit import make_model, make_ppo, make_trainer, with_episodes

from epo_trl.errors import InputError
from epo_trl.methods import Comm
from epo_trl.trainers.lag import LaggedPolicy, importance_weights, make_lagged_policy


def test_the_weights_of_two_rl_steps_ago_act_and_the_trained_ones_come_back():
    model, policy = torch.nn.Linear(1, 1, bias=False), LaggedPolicy(2)
    acted = []
    for step, value in enumerate((1.0, 2.0, 3.0, 4.0)):
        model.weight.data.fill_(value)
        policy.remember(model, step)
        with policy.acting(model):
            acted.append(model.weight.item())
        assert model.weight.item() == value
    assert acted == [1.0, 1.0, 1.0, 2.0], "until there are that many, the oldest weights act"
    resumed = LaggedPolicy(2)
    resumed.load_state_dict(policy.state_dict())
    resumed.remember(model, 3)
    with resumed.acting(model):
        assert model.weight.item() == 2.0, "the rollout of an RL step that is repeated has the same weights"


def test_an_error_in_a_rollout_gives_the_trained_weights_back():
    model, policy = torch.nn.Linear(1, 1, bias=False), LaggedPolicy(1)
    policy.remember(model, 0)
    model.weight.data.fill_(7.0)
    with pytest.raises(KeyError), policy.acting(model):
        raise KeyError
    assert model.weight.item() == 7.0


def test_importance_weights_by_hand():
    """pi / mu is 2, 5 and 1/4; at most 3. The last token does not count."""
    logps = torch.tensor([[math.log(2.0), math.log(5.0), -math.log(4.0), 9.0]]) - 1.0
    mask = torch.tensor([[1, 1, 1, 0]])
    found, metrics = importance_weights(logps, torch.full((1, 4), -1.0), mask, 3.0, Comm())
    torch.testing.assert_close(found, torch.tensor([[2.0, 3.0, 0.25, 1.0]]))
    assert metrics["lag/importance_weight"] == pytest.approx((2 + 3 + 0.25) / 3)
    assert metrics["lag/logp_difference"] == pytest.approx((math.log(2) + math.log(5) + math.log(4)) / 3)
    there = torch.tensor([2.0, 3.0, 4.0])  # the other rank's sums of weights and distances over four tokens
    _, both = importance_weights(logps, torch.full((1, 4), -1.0), mask, 3.0, Comm(sum=lambda own: own + there, count=2))
    assert both["lag/importance_weight"] == pytest.approx((2 + 3 + 0.25 + 2) / 7)
    assert both["lag/logp_difference"] == pytest.approx((math.log(2) + math.log(5) + math.log(4) + 3) / 7)
    free, _ = importance_weights(logps, torch.full((1, 4), -1.0), mask, None, Comm())
    assert free[0, 1].item() == pytest.approx(5.0)


@pytest.mark.parametrize("make", [make_trainer, make_ppo])
def test_each_batch_is_played_by_the_weights_of_its_lag(tmp_path, make):
    each, played = EachStep(), []
    trainer = make(tmp_path, simulated_lag=2, max_steps=4, learning_rate=1e-2, callbacks=[each])
    play, (name, *_) = trainer.play, weights(trainer)

    def spy(tasks, **kwargs):
        played.append(weights(trainer)[name])
        return play(tasks, **kwargs)

    trainer.play = spy
    trainer.train()
    began = [step[name] for step in each.seen]  # an optimizer step is an RL step here
    assert len(played) == 4 and not torch.equal(began[0], began[1])
    for step, weight in enumerate(played):
        assert torch.equal(weight, began[max(0, step - 2)])


def collected(folder, **changes):
    """Returns the batches of three RL steps with the same episodes, and the models that each of them began with."""
    trainer = make_trainer(
        folder, max_steps=3, learning_rate=1e-2, lr_scheduler_type="constant", temperature=TEMPERATURE, **changes
    )
    with_episodes(trainer)
    inputs, models, original = [], [], trainer._generate_and_score_completions

    def collect(*args):
        models.append(make_model())
        models[-1].load_state_dict(trainer.model.state_dict())
        inputs.append(original(*args))
        return inputs[-1]

    trainer._generate_and_score_completions = collect
    trainer.add_callback(StopAt(3))
    trainer.train()
    return inputs, models, trainer


def test_the_advantages_are_weighted_by_what_the_update_would_repeat(tmp_path):
    """Plain forwards of the weights at the start of the second RL step and of the first, token by token."""
    inputs, models, trainer = collected(tmp_path / "lag", simulated_lag=1)
    plain, *_ = collected(tmp_path / "plain", simulated_lag=1, lag_correction=False)
    torch.testing.assert_close(inputs[0]["advantages"], plain[0]["advantages"], rtol=0, atol=1e-6)
    with torch.no_grad():
        acting, current = (
            torch.stack([token.logp for token in plain_tokens(model, "windowed")]) for model in models[:2]
        )
    weights = (current - acting).exp().clamp(max=3.0)
    assert weights.min() < 0.9 and (weights == 3.0).any() and (weights < 3.0).any()
    sampled = (inputs[1]["completion_mask"] * inputs[1]["tool_mask"]).bool()
    expected = weights * plain[1]["advantages"][sampled]
    torch.testing.assert_close(inputs[1]["advantages"][sampled], expected, rtol=1e-4, atol=1e-6)
    assert expected.count_nonzero() > 10
    one, two = logged(trainer, "lag/importance_weight")[:2]
    assert one == pytest.approx(1.0, abs=1e-5), "in the first RL step the acting weights are the trained ones"
    assert two == pytest.approx(weights.mean().item(), rel=1e-4)


@pytest.mark.parametrize("corrects", [True, False])
def test_the_mask_of_off_policy_sequences_reads_the_log_probabilities_of_the_policy_that_played(tmp_path, corrects):
    """TRL masks sequences by the difference between `sampling_per_token_logps` and the current log-probabilities."""
    inputs, models, _ = collected(
        tmp_path, simulated_lag=1, lag_correction=corrects, off_policy_mask_threshold=1e9, save_strategy="no"
    )
    with torch.no_grad():
        played, trained = (torch.stack([token.logp for token in plain_tokens(m, "windowed")]) for m in models[:2])
    sampled = (inputs[1]["completion_mask"] * inputs[1]["tool_mask"]).bool()
    torch.testing.assert_close(inputs[1]["sampling_per_token_logps"][sampled], played, rtol=1e-4, atol=1e-5)
    assert (played - trained).abs().max() > 0.1


@pytest.mark.parametrize("settings", [{}, MINI_BATCHES])
def test_without_learning_a_lag_changes_nothing(tmp_path, settings):
    still = {"learning_rate": 0.0, "max_steps": 2, **settings, "save_strategy": "no"}
    seen = []
    for lag in (0, 3):
        trainer = resumable(tmp_path / str(lag), **still, simulated_lag=lag)
        trainer.train()
        seen.append((trainer.last_episodes, logged(trainer, "env/return"), logged(trainer, "loss")))
    assert seen[0][:2] == seen[1][:2]
    assert seen[0][2] == pytest.approx(seen[1][2], abs=1e-5)
    found = logged(trainer, "lag/importance_weight")
    assert found == pytest.approx([1.0] * len(found), abs=1e-5) and found


@pytest.mark.slow
def test_a_lagged_run_resumes_bit_equal(tmp_path):
    changes = {"simulated_lag": 2, "learning_rate": 1e-2}
    whole = resumable(tmp_path / "whole", **changes)
    whole.train()
    resumable(tmp_path / "cut", **changes, callbacks=[StopAt(3)]).train()
    resumed = resumable(tmp_path / "cut", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert_bit_equal(weights(resumed), weights(whole))


def test_a_second_run_begins_without_the_weights_of_the_first(tmp_path):
    trainer = make_trainer(tmp_path, simulated_lag=3, max_steps=2, learning_rate=1e-2)
    trainer.train()
    trainer.train()
    assert len(trainer.lagged.state_dict()["weights"]) == 2


@pytest.mark.parametrize("field", ["lag_correction", "vllm_importance_sampling_correction"])
def test_with_vllm_the_correction_is_trls(tmp_path, field):
    trainer = make_trainer(tmp_path, **{field: False})
    trainer.args.simulated_lag = 2
    assert make_lagged_policy(trainer).lag == 2
    trainer.args.use_vllm = True
    wanted = trainer.args.lag_correction
    with pytest.raises(InputError, match=f"^vllm_.*: expected {wanted} with lag_correction {wanted}, got {not wanted}"):
        make_lagged_policy(trainer)
    trainer.args.lag_correction = trainer.args.vllm_importance_sampling_correction
    assert make_lagged_policy(trainer).lag == 2
