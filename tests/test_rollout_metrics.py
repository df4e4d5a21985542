"""What is logged about episodes and about time: by hand, over ranks, with a clock that is set, and in a run."""

import math
from dataclasses import astuple, fields

import pytest
import torch
from rollout_parts import ScriptedEnv, ScriptedPolicy, byte_tokenizer, context_of
from run_kit import count_seconds, logged
from trainer_kit import make_episodes, make_trainer

from epo_trl.envs.base import Faults
from epo_trl.envs.toy import ToySuite
from epo_trl.methods import Comm
from epo_trl.rollout import ContextBuilder, RolloutSettings, RolloutTimes, loop, play_episodes
from epo_trl.rollout.parsing import TaggedActions
from epo_trl.trainers.collection import rollout_metrics
from epo_trl.types import Episode, StopReason, Turn

END = 9  # ends a response


def episode(stop, turns, *, won=False):
    """Returns an episode of `(tokens of the prompt, last token, is_valid, reward, dropped_turns)` turns."""
    made = (
        Turn((1,) * prompt, (5, last), "", "", "", valid, reward, dropped_turns=dropped)
        for prompt, last, valid, reward, dropped in turns
    )
    return Episode("train/0", "", "", tuple(made), stop, won=won)


WON = episode(StopReason.WON, [(4, END, True, 0.0, 0), (6, 7, False, -0.1, 1), (8, END, True, 10.0, 2)], won=True)
LATE = episode(StopReason.TURN_LIMIT, [(5, END, True, 0.5, 0), (3, END, False, -0.1, 0)])
LOST = episode(StopReason.LOST, [(7, 6, True, 0.0, 1)])
ABORTED = episode(StopReason.ABORTED, [(99, 7, False, 99.0, 3)], won=True)
EPISODES = [WON, LATE, LOST, ABORTED, episode(StopReason.ABORTED, [])]
WANT = {
    "env/success_rate": 1 / 3,
    "env/return": (9.9 + 0.4 + 0.0) / 3,
    "env/turns": 6 / 3,
    "env/invalid_actions": 2 / 6,
    "env/aborted": 2 / 5,
    "env/restarts": 2,
    "env/timeouts": 3,
    "env/retries": 5,
    "rollout/prompt_tokens": (18 + 8 + 7) / 6,
    "rollout/shortened_prompts": 3 / 6,
    "rollout/cut_responses": 2 / 6,
    "time/generate": 11.0,
    "time/env": 13.0,
    "time/text": 17.0,
    "stop/won": 1 / 5,
    "stop/lost": 1 / 5,
    "stop/truncated": 0.0,
    "stop/turn_limit": 1 / 5,
    "stop/context_full": 0.0,
    "stop/aborted": 2 / 5,
}
TIMES = RolloutTimes(generate=11.0, env=13.0, text=17.0)
FAULTS = Faults(restarts=2, timeouts=3, retries=5)


def metrics_of(episodes, faults=FAULTS, ranks=None):
    return rollout_metrics(episodes, TIMES, faults, [END], ranks or Comm(), torch.device("cpu"))


def test_by_hand():
    """Two of the five carry no signal; of the three others' six turns the second and the last response were cut."""
    assert metrics_of(EPISODES) == pytest.approx(WANT)


def test_episodes_that_were_all_aborted_have_no_success_and_no_turns():
    """TRL leaves NaN out of the mean that it logs."""
    found = metrics_of([ABORTED, episode(StopReason.ABORTED, [])])
    of_others = {name for name, value in found.items() if math.isnan(value)}
    assert of_others == {
        "env/success_rate", "env/return", "env/turns", "env/invalid_actions",
        "rollout/prompt_tokens", "rollout/shortened_prompts", "rollout/cut_responses",
    }  # fmt: skip
    assert found["env/aborted"] == found["stop/aborted"] == 1


def test_two_ranks_log_what_one_would():
    """Counts are summed before they are divided; seconds are those of the rank itself."""
    theirs = []
    metrics_of(EPISODES[2:], Faults(1, 1, 1), Comm(sum=lambda own: theirs.append(own) or own))
    here = Comm(sum=lambda own: own + theirs[0], count=2)
    assert metrics_of(EPISODES[:2], Faults(1, 2, 4), here) == pytest.approx(WANT)


class Clock:
    """Stands in for `time`: it moves when it is told to."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def slow(self, call, seconds):
        def slowed(*args, **kwargs):
            self.now += seconds
            return call(*args, **kwargs)

        return slowed


def test_a_rollout_tells_its_seconds_apart(monkeypatch):
    """Two episodes of two turns: 2 resets, 4 steps and 4 parsed responses, 2 calls of the policy, prompts and texts."""
    clock, tokenizer = Clock(), byte_tokenizer()
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(ContextBuilder, "build", clock.slow(ContextBuilder.build, 100.0))
    monkeypatch.setattr(TaggedActions, "read", clock.slow(TaggedActions.read, 0.25))
    context = context_of(tokenizer)
    monkeypatch.setattr(tokenizer, "batch_decode", clock.slow(tokenizer.batch_decode, 1000.0))
    envs = [ScriptedEnv(), ScriptedEnv()]
    for env in envs:
        monkeypatch.setattr(env, "reset", clock.slow(env.reset, 1.0))
        monkeypatch.setattr(env, "step", clock.slow(env.step, 10.0))
    policy, times = clock.slow(ScriptedPolicy(tokenizer), 10000.0), RolloutTimes()
    play_episodes(envs, [("a", 0), ("b", 0)], policy, context, RolloutSettings(max_turns=2), times=times)
    assert astuple(times) == (2 * 10000.0, 2 * 1.0 + 4 * 10.0 + 4 * 0.25, 2 * 100.0 + 2 * 1000.0)
    assert [field.name for field in fields(times)] == ["generate", "env", "text"]


class FaultySuite(ToySuite):
    """Counts three restarts, one timeout and two retries more each time it is asked."""

    asked = 0

    def faults(self):
        self.asked += 1
        return Faults(3 * self.asked, self.asked, 2 * self.asked)


def test_a_run_logs_the_seconds_and_faults_of_each_rollout(tmp_path, monkeypatch):
    """Not those since the run began. Between two looks at the clock lies a second: 3 in the pass with the rollout, of
    which the update did not take 0.006, and 1 in the other pass, with an update of its own."""
    count_seconds(monkeypatch)
    settings = {"max_steps": 4, "per_device_train_batch_size": 4, "steps_per_generation": 2}
    checkpoints = {"save_strategy": "steps", "save_steps": 3, "trust_checkpoint": True}  # inside the second RL step

    def play(tasks, *, times, **_):
        times.generate, times.env, times.text = times.generate + 0.003, times.env + 0.002, times.text + 0.001
        return make_episodes()

    for name, start in (("straight", None), ("resumed", str(tmp_path / "straight" / "checkpoint-3"))):
        trainer = make_trainer(tmp_path / name, suite=FaultySuite(), **settings, **checkpoints)
        trainer.play = play
        trainer.train(resume_from_checkpoint=start)
        assert logged(trainer, "time/generate") == pytest.approx([0.003, 0.003])
        assert logged(trainer, "time/env") == pytest.approx([0.002, 0.002])
        assert logged(trainer, "time/text") == pytest.approx([0.001, 0.001])
        updates = {line["step"]: line["time/update"] for line in trainer.state.log_history if "time/update" in line}
        assert updates == pytest.approx({2: 4 - 0.006, 4: 4 - 0.006})
        for name, count in (("restarts", 3), ("timeouts", 1), ("retries", 2)):
            assert logged(trainer, f"env/{name}") == [count, count]
