"""An environment that breaks the contract aborts its own episode, with its error in the log, and no other."""

import json
from dataclasses import asdict

import pytest
from hostile_envs import ABORTED, ODD, HostileSuite
from rollout_parts import ScriptedPolicy, byte_tokenizer, context_of

from epo_trl.envs.border import close_all
from epo_trl.envs.pool import PooledSuite
from epo_trl.rollout import RolloutSettings, play_episodes
from epo_trl.types import StopReason


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def play(tokenizer, suite, tasks):
    envs = [suite.make_env() for _ in tasks]
    settings = RolloutSettings(max_turns=2, env_reward_weight=1.0)
    pairs = [(task, 0) for task in tasks]
    try:
        return play_episodes(envs, pairs, ScriptedPolicy(tokenizer), context_of(tokenizer), settings)
    finally:
        close_all(envs)


def check(episode):
    """Aborted, with its error in words; and what is kept of it can be written down."""
    says = ABORTED.get(episode.task_id)
    if says is None:
        assert (episode.stop, episode.error) == (StopReason.TURN_LIMIT, ""), episode.task_id
    else:
        assert episode.stop is StopReason.ABORTED and episode.error and says in episode.error, episode.task_id
        assert type(episode.error) is str and len(episode.error) < 2200 and len(episode.error.splitlines()) == 1
    kept = json.loads(json.dumps(asdict(episode.without_tokens()), allow_nan=False))
    assert all(type(turn["reward"]) is float for turn in kept["turns"])


@pytest.mark.parametrize("task", ABORTED)
def test_a_hostile_environment_aborts_its_own_episode_alone(tokenizer, task):
    episodes = play(tokenizer, HostileSuite(), ["good", task, "good"])
    for episode in episodes:
        check(episode)
    assert len(episodes[1].turns) == 0


@pytest.mark.parametrize("task", ODD)
def test_what_is_odd_and_can_be_understood_is_played(tokenizer, task):
    for episode in play(tokenizer, HostileSuite(), ["good", task]):
        if task == "step/much to see" and episode.task_id == task:
            assert episode.stop is StopReason.CONTEXT_FULL
        else:
            check(episode)


def test_a_worker_process_survives_all_of_them(tokenizer):
    suite = PooledSuite(HostileSuite(), workers=1)
    tasks = ["good", *ABORTED, "good"]
    for episode in play(tokenizer, suite, tasks):
        check(episode)
    assert suite.faults().restarts == suite.faults().timeouts == suite.faults().retries == 0


@pytest.mark.parametrize("when", ["reset", "step"])
def test_ctrl_c_stops_the_run(tokenizer, monkeypatch, when):
    suite = HostileSuite()
    env = suite.make_env()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(env, when, interrupted)
    monkeypatch.setattr(suite, "make_env", lambda: env)
    with pytest.raises(KeyboardInterrupt):
        play(tokenizer, suite, ["good"])


def test_environments_are_all_closed_whatever_one_raises(monkeypatch):
    closed = []

    class Env:
        def __init__(self, error):
            self.error = error

        def close(self):
            closed.append(self)
            if self.error:
                raise self.error

    with pytest.warns(UserWarning, match="close.. failed: SystemExit: 1"):
        close_all([Env(None), Env(SystemExit(1)), Env(None)])
    assert len(closed) == 3
