"""Environments behind a server of OpenEnv keep our contract, and train. The server is the package's own."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("openenv")

import forked
from processes import assert_soon
from server_process import running_server
from tool_worlds import check_training, wait_for_seat

from epo_trl.envs import EnvError
from epo_trl.envs.base import submit
from epo_trl.envs.openenv import OpenEnvArguments
from epo_trl.envs.registry import build_suite as build_registered
from epo_trl.envs.testing import EnvContract

pytestmark = pytest.mark.slow

SESSIONS = 12


@pytest.fixture(scope="module")
def url():
    script = Path(__file__).with_name("openenv_server.py")
    with running_server(lambda port: [script, str(port), str(SESSIONS)], start=forked.start_server) as (address, _):
        yield address


def build_suite(url, **settings):
    given = {"base_url": url, "observation_key": "messages.-1.content", "train_tasks": 9, "test_tasks": 3, **settings}
    return OpenEnvArguments(**given).make_suite()


class TestColours(EnvContract):
    expert_turns = None
    player = staticmethod(lambda info, rng: rng.choice(["red", "green", "blue"]))

    @pytest.fixture(autouse=True)
    def server(self, url):
        self.url = url

    def make_suite(self):
        return build_suite(self.url)


def test_a_task_is_a_seed_and_what_the_server_says_is_read_by_name(url):
    env = build_suite(url, reset_kwargs='{"hint": " Not black."}', task_text="name the colour").make_env()
    observation, info = env.reset(options={"task_id": "train/1"})
    assert (observation, info["task"]) == ("Which colour is it? Not black.", "name the colour")
    assert env.step("red")[:4] == ("No.", 0.0, False, False)
    *_, info = env.step("a horse")
    assert (info["accepted"], info["won"]) == (False, False)
    observation, reward, terminated, truncated, info = env.step("green")
    assert (observation, reward, terminated, truncated, info["won"]) == ("Yes.", 1.0, True, False, True)
    with pytest.raises(EnvError, match="no episode is running"):
        env.step("green")
    env.reset(options={"task_id": "iid/1"})  # 1000001 % 3 == 2
    assert env.step("blue")[4]["won"]
    env.close()


def test_what_the_server_does_not_take_is_an_invalid_action(url):
    env = build_suite(url).make_env()
    env.reset(options={"task_id": "train/0"})
    for action, code in (("x" * 101, "VALIDATION_ERROR"), ("crash", "EXECUTION_ERROR")):
        observation, reward, terminated, _, info = env.step(action)
        assert (reward, terminated, info["accepted"]) == (0.0, False, False)
        assert code in info["refusal"] and observation.endswith(info["refusal"])
    assert env.step("red")[4]["won"]
    env.close()


class Ending:
    """A server of `epo-trl serve` whose game fails, or ends by its turn limit with these fields."""

    _ws = None

    def __init__(self, fails, **said):
        self.fails, self.failed, self.said = fails, False, said

    async def reset(self, **options):
        return SimpleNamespace(observation={"text": "start"}, reward=0.0, done=False)

    async def step(self, payload):
        if self.fails:
            self.failed = True
            raise RuntimeError("Server error: the JVM died (code: EXECUTION_ERROR)")
        observation = {"text": "late", "truncated": True, **self.said}
        return SimpleNamespace(observation=observation, reward=0.5, done=True)

    async def state(self):
        return {"running": not self.failed}

    async def close(self):
        pass


@pytest.mark.parametrize("fails", [True, False])
def test_a_served_game_that_fails_aborts_the_episode_and_its_turn_limit_truncates(fails):
    env = build_suite("http://nowhere", observation_key="text").make_env()
    env._client = Ending(fails)
    env.reset(options={"task_id": "train/0"})
    if fails:
        with pytest.raises(EnvError, match="the JVM died"):
            env.step("look")
    else:
        assert env.step("look")[:4] == ("late", 0.5, False, True)


@pytest.mark.parametrize(("score", "expected"), [(0, 0), (62.5, 62.5), (None, 0.5)])
def test_the_score_is_the_server_s_or_else_the_sum_of_rewards(score, expected):
    env = build_suite("http://nowhere", observation_key="text").make_env()
    env._client = Ending(fails=False, score=score)
    assert env.reset(options={"task_id": "train/0"})[1]["score"] == 0.0
    assert env.step("look")[4]["score"] == expected


def test_a_connection_that_is_lost_aborts_the_episode_and_the_next_one_has_another(url):
    """The client connects again by itself, to a session that would play on without a reset."""
    env = build_suite(url).make_env()
    for _ in range(2):
        env.reset(options={"task_id": "train/0"})
        submit(env._client._ws.close()).result()
        with pytest.raises(EnvError, match="the connection was lost"):
            env.step("red")
    env.reset(options={"task_id": "train/0"})
    submit(env._client._ws.close()).result()
    env.reset(options={"task_id": "train/0"})
    assert env.step("red")[4]["won"]
    env.close()


def test_a_run_may_go_on_with_a_server_of_another_address():
    given = [OpenEnvArguments(base_url=f"http://{host}", timeout_seconds=len(host)) for host in ("a", "bcd")]
    assert build_registered(given[0]).settings == build_registered(given[1]).settings


def test_an_answer_is_seen_without_waiting_for_it(url):
    env = build_suite(url).make_env()
    env.reset(options={"task_id": "train/0"})
    env.step_async("wait")
    assert not env.has_answer()
    assert_soon(env.has_answer)
    assert env.step_wait()[0] == "That is no colour." and env.has_answer()
    env.close()


def test_a_session_ends_that_is_closed_before_its_answer(url):
    for _ in range(SESSIONS + 1):
        env = build_suite(url, reset_kwargs={"hint": "wait"}).make_env()
        env.reset_async(options={"task_id": "train/0"})
        time.sleep(0.1)
        env.close()
    wait_for_seat(build_suite(url), 60)


def test_an_action_may_be_a_json_object_and_an_observation_all_that_is_said(url):
    env = build_suite(url, action_key="", observation_key="").make_env()
    observation, _ = env.reset(options={"task_id": "train/0"})
    assert (
        observation
        == '{"metadata": {}, "messages": [{"content": "old"}, {"content": "Which colour is it?"}], "accepted": true}'
    )
    assert env.step("red")[4]["refusal"] == "an action is a JSON object here"
    assert env.step('{"message": "red"}')[4]["won"]
    env.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"observation_key": "text"}, "observation_key: expected a key of {'metadata'.*got 'text'"),
        ({"base_url": "http://127.0.0.1:1"}, "base_url: http://127.0.0.1:1: Failed to connect"),
    ],
)
def test_a_server_that_is_not_there_or_says_something_else_is_named(settings, says, url):
    env = build_suite(url, **settings).make_env()
    with pytest.raises(EnvError, match=says):
        env.reset(options={"task_id": "train/0"})
    env.close()


def test_it_trains_for_two_steps(url, tmp_path):
    suite = build_suite(url, task_text="name it")
    check_training(tmp_path, suite, ["red", "green", "blue"], context="concatenated", prompt_template="general_free")


def test_sessions_are_separate_and_a_server_that_is_full_says_so(url):
    """The last test: the server needs a moment to notice that sessions have ended."""
    envs = []
    try:
        with pytest.raises(EnvError, match="base_url: http.*CAPACITY_REACHED.*larger max_concurrent_envs"):
            for number in range(SESSIONS + 1):
                envs.append(build_suite(url).make_env())
                envs[-1].reset(options={"task_id": f"train/{number % 3}"})
        playing = envs[:-1]
        assert len(playing) >= 3
        for env in playing:
            env.step_async("red")
        assert [env.step_wait()[4]["won"] for env in playing] == [number % 3 == 0 for number in range(len(playing))]
    finally:
        for env in envs:
            env.close()
