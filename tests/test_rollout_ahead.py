"""Rollouts in the background: which weights play which batch, what an error or an end of the run leaves behind."""

import signal
import threading

import pytest
from datasets import Dataset
from local_server import make_served
from run_kit import MINI_BATCHES, SendSignals, StopAt, assert_bit_equal, logged, weights
from trainer_kit import make_ppo, make_trainer, results_of
from transformers import TrainerCallback

from epo_trl.errors import EpoTrlError

pytestmark = pytest.mark.slow

SMALL = {"max_turns": 2, "max_completion_length": 4, "max_steps": 4}


def length_reward(completions, episode, **_):
    """Rewards of a policy that never wins: the share of even tokens."""
    ids = [[token for turn in each.turns for token in turn.response_ids] for each in episode]
    return [sum(token % 2 == 0 for token in row) / max(len(row), 1) for row in ids]


def served(folder, **changes):
    return make_served(folder, **{**SMALL, "reward_funcs": length_reward, **changes})


@pytest.mark.parametrize("settings", [{}, MINI_BATCHES | {"save_strategy": "no"}])
def test_without_learning_running_ahead_changes_nothing(tmp_path, settings):
    """Also over several epochs of the tasks: two groups of four make an epoch of three RL steps."""
    tasks = Dataset.from_dict({"prompt": [f"train/{i}" for i in range(6)]})
    steps = 4 * (MINI_BATCHES["steps_per_generation"] * 2 if settings else 1)
    seen = []
    for ahead in (False, True):
        trainer, _ = served(
            tmp_path / str(ahead),
            rollout_ahead=ahead,
            train_dataset=tasks,
            learning_rate=0.0,
            **{**settings, "max_steps": steps},
        )
        kept = results_of(trainer, "_collect")
        trainer.train()
        assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx([1.0] * trainer.rl_step)
        seen.append((kept, logged(trainer, "loss"), logged(trainer, "rewards/length_reward/mean")))
    assert len(seen[0][0]) == 4 and seen[0] == seen[1]
    assert logged(trainer, "lag/rl_steps") == [0.0, 1.0, 1.0, 1.0], "each later batch was played ahead"


@pytest.mark.parametrize("make", [make_trainer, make_ppo])
def test_one_batch_ahead_trains_as_in_turn_with_the_weights_of_one_rl_step_ago(tmp_path, make):
    rewards = {"reward_funcs": None} if make is make_ppo else {}
    real, server = served(tmp_path / "real", make=make, rollout_ahead=True, **rewards)
    real.train()
    in_turn, _ = served(tmp_path / "in-turn", make=make, behind=1, **rewards)
    in_turn.train()
    assert_bit_equal(weights(real), weights(in_turn))
    on_policy, _ = served(tmp_path / "on-policy", make=make, **rewards)
    on_policy.train()
    assert any(not weight.equal(weights(on_policy)[name]) for name, weight in weights(real).items())
    assert logged(real, "lag/rl_steps") == [0.0, 1.0, 1.0, 1.0] and server.sent == [0, 1, 2, 3]
    assert logged(real, "sampling/importance_sampling_ratio/mean")[1] != pytest.approx(1.0, abs=1e-3)


def gated(folder, then=lambda server: None):
    """Returns a trainer whose server answers the second batch when the first update has begun, and `then` happened."""
    gate = threading.Event()

    class Open(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            then(server)
            gate.set()

    trainer, server = served(folder, rollout_ahead=True, max_steps=2, callbacks=[Open()])
    generate = server.generate

    def wait_and_generate(*args, **kwargs):
        assert not trainer.engine._is_ahead or gate.wait(60)
        return generate(*args, **kwargs)

    server.generate = wait_and_generate
    return trainer


def test_the_next_batch_is_played_during_the_update(tmp_path):
    """In turn the server would wait for ever."""
    trainer = gated(tmp_path)
    trainer.train()
    assert trainer.rl_step == 2 and not trainer.ahead.is_playing


def test_no_batch_is_played_twice_or_too_many(tmp_path):
    trainer, server = served(tmp_path, rollout_ahead=True, max_steps=3)
    played, play = [], trainer.play
    trainer.play = lambda tasks, **kwargs: played.append(tasks) or play(tasks, **kwargs)
    trainer.train()
    assert len(played) == trainer.rl_step == 3 and not trainer.ahead.is_playing
    assert logged(trainer, "time/wait_for_rollout")[0] > 0 and len(logged(trainer, "time/wait_for_update")) == 3


def test_an_evaluation_waits_for_the_rollout_and_has_its_own_temperature_and_the_newest_weights(tmp_path):
    trainer, server = served(
        tmp_path,
        rollout_ahead=True,
        eval_strategy="steps",
        eval_steps=1,
        eval_temperature=0.5,
        eval_episodes=2,
        max_steps=2,
    )
    server.top_k = 9
    asked, generate = [], server.generate

    def spy(prompts, n, *, temperature, **settings):
        asked.append(((temperature, settings["top_k"]), trainer.state.global_step, server.sent[-1:]))
        return generate(prompts, n, temperature=temperature, **settings)

    server.generate = spy
    trainer.train()
    assert {sampling for sampling, *_ in asked} == {(0.5, 0), (1.0, 9)}
    evaluated = [(step, sent) for (t, _), step, sent in asked if t == 0.5]
    assert evaluated == sorted(evaluated) and {step for step, _ in evaluated} == {1, 2}
    assert all(sent == [step] for step, sent in evaluated), "RL step 1 begins with the weights after one update"


# --------------------------------------------------------------------------------------------------------- resuming


def test_a_resumed_run_drops_the_batch_in_flight_and_plays_it_again(tmp_path):
    """Inside an RL step, with the same seeds and the checkpoint's weights: without learning the whole run comes out."""
    stop = 5
    changes = dict(MINI_BATCHES, rollout_ahead=True, learning_rate=0.0, save_strategy="steps", save_steps=stop)
    changes["max_steps"] = 4 * MINI_BATCHES["steps_per_generation"] * 2
    whole, _ = served(tmp_path / "whole", **changes)
    expected = results_of(whole, "_collect")
    whole.train()
    cut, _ = served(tmp_path / "cut", **changes, callbacks=[StopAt(stop)])
    before = results_of(cut, "_collect")
    cut.train()
    assert not cut.ahead.is_playing
    resumed, _ = served(tmp_path / "cut", **changes)
    after = results_of(resumed, "_collect")
    resumed.train(resume_from_checkpoint=True)
    assert before + after == expected and logged(resumed, "loss") == logged(whole, "loss")
    lags = logged(resumed, "lag/rl_steps")[len(before) :]
    assert lags == [0.0] + [1.0] * (len(after) - 1)


# ----------------------------------------------------------------------------------------------------- ends of a run


def test_a_server_that_dies_ends_the_run_with_its_address(tmp_path):
    """Before weights are sent to it."""
    trainer = gated(tmp_path, lambda server: setattr(server, "dead", True))
    with pytest.raises(EpoTrlError, match="the vLLM server at http://in.this.process: refused"):
        trainer.train()
    assert trainer.rl_step == 1 and not trainer.ahead.is_playing, "the batch before it was trained on"


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "preemption"])
def test_a_run_that_is_interrupted_ends_its_rollout_and_the_trainer_still_works(tmp_path, name):
    """During the update of an RL step, while the next batch waits for its server."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt = SendSignals("on_pre_optimizer_step", 1, name)
        trainer, server = served(
            tmp_path, rollout_ahead=True, max_turns=9, max_steps=3, callbacks=[interrupt], save_strategy="no"
        )
        server.seconds = 0.05
        if name == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
        else:
            trainer.train()
            assert trainer.preempted and (tmp_path / "checkpoint-2").is_dir()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not trainer.ahead.is_playing and not trainer.engine.stopped
    assert trainer.play([("train/0", 0)])[0].turns


# ---------------------------------------------------------------------------------------------------------- settings


def test_an_rl_step_repeats_no_rollout_although_an_evaluation_comes_between_them(tmp_path):
    trainer, _ = served(tmp_path)
    first = trainer.play([("train/0", 0)])
    trainer.evaluate()
    assert trainer.play([("train/0", 0)]) != first
    again, _ = served(tmp_path)
    assert again.play([("train/0", 0)]) == first, "a new run begins with the same seeds"
