"""The sessions of `epo-trl serve` without a server: which task a reset chooses, limits, and failures."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from word_game import WordGame, reward_func, word_rows

from epo_trl.envs import EnvError, TaskSuite, TextEnv
from epo_trl.envs.tools.suite import ToolSuite

FAILURES = {"fail": RuntimeError("it failed"), "exit": SystemExit(3), "next": StopIteration()}


class Count(TextEnv):
    """Counts the actions; those of `FAILURES` raise, `hang` waits for the event, `win` wins."""

    release = threading.Event()
    threads: set = set()
    closed = 0

    def _info(self, won=False):
        Count.threads.add(threading.get_ident())
        return {"admissible_actions": ("win", "fail", "hang"), "won": won, "task": "count", "task_type": "one"}

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return f"{options['task_id']} with seed {seed}, options {options.get('hard')}", self._info()

    def step(self, action):
        if action in FAILURES:
            raise FAILURES[action]
        if action == "hang":
            Count.release.wait(10)
        self.steps += 1
        won = action == "win"
        return f"{self.steps} {action}", float(won), won, False, self._info(won)

    def close(self):
        Count.closed += 1


class Counts(TaskSuite):
    name = "counts"

    def task_ids(self, split):
        return [f"{split}/{number}" for number in range(3 if split == "train" else 2)]

    def make_env(self):
        return Count()


def make_session(suite=None, **rules):
    from epo_trl.lab.serve.server import GameSession, ServedGames  # for seconds: not in every worker

    return GameSession(ServedGames(suite or Counts(), **rules))


def play(session, *actions, **task):
    """Resets, performs the actions and returns the last observation."""

    async def episode():
        seen = await session.reset_async(**task)
        for action in actions:
            seen = await session.step_async(SimpleNamespace(message=action))
        return seen

    return asyncio.run(episode())


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"seed": 4}, "train/1 with seed 4"),
        ({"seed": 1_000_001}, "iid/1 with seed 1000001"),
        ({"seed": 1_000_002}, "iid/0 with seed 1000002"),
        ({"split": "ood", "index": 1, "seed": 7}, "ood/1 with seed 7"),
        ({"split": "ood", "seed": 3}, "ood/1 with seed 3"),
        ({"task_id": "train/2"}, "train/2 with seed 0"),
    ],
)
def test_a_reset_chooses_a_task_by_seed_place_or_id(task, expected):
    assert play(make_session(), **task).text == f"{expected}, options None"


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"split": "valid"}, "split: .*got 'valid'"),
        ({"split": "iid", "index": 2}, "list index out of range"),
        ({"task": "train/0"}, "reset: expected seed, episode_id, task_id, split, index, got task='train/0'"),
    ],
)
def test_a_reset_that_chooses_no_task_is_an_error(task, says):
    with pytest.raises((EnvError, IndexError), match=says):
        play(make_session(), **task)


def test_an_observation_says_what_happened():
    session = make_session(protocol="rules5", max_turns=5, env_options={"hard": True})
    first = play(session, task_id="train/0")
    assert first.text == "train/0 with seed 0, options True"
    assert first.metadata == {"suite": "counts", "protocol": "rules5", "max_turns": 5}
    seen = play(session, "  no  way ", task_id="train/0", episode_id="e")
    assert (seen.text, seen.accepted, seen.done, seen.turn) == ("1 no way", False, False, 1)
    assert seen.admissible_actions == ["win", "fail", "hang"]
    seen = play(session, "x", "win", task_id="train/0", episode_id="e")
    assert (seen.accepted, seen.done, seen.reward, seen.is_success, seen.truncated) == (True, True, 1.0, True, False)
    state = session.state
    assert (state.episode_id, state.step_count, state.task_id, state.running) == ("e", 2, "train/0", False)


def test_what_a_served_tool_environment_offers_comes_with_the_first_observation():
    suite = ToolSuite(WordGame, word_rows(), reward_funcs=[reward_func])
    (tool,) = play(make_session(suite), seed=0).metadata["tools"]
    assert tool.startswith("guess(guess: str)")


def test_the_turn_limit_truncates_and_a_win_on_the_last_turn_is_no_truncation():
    seen = play(make_session(max_turns=2), "a", "b", seed=0)
    assert (seen.done, seen.truncated, seen.is_success) == (True, True, False)
    seen = play(make_session(max_turns=2), "a", "win", seed=0)
    assert (seen.done, seen.truncated, seen.is_success) == (True, False, True)


@pytest.mark.parametrize("actions", [("win", "a"), ("fail",)])
def test_after_an_end_or_a_failure_only_a_reset_helps(actions):
    session = make_session()
    with pytest.raises((EnvError, RuntimeError), match="it failed|expected a running episode"):
        play(session, *actions, seed=0)
    with pytest.raises(EnvError, match="step: expected a running episode, got none"):
        asyncio.run(session.step_async(SimpleNamespace(message="a")))
    assert play(session, "a", seed=0).turn == 1


@pytest.mark.parametrize("instant", [False, True])
@pytest.mark.parametrize(("action", "says"), [("exit", "SystemExit: 3"), ("next", "StopIteration: ")])
def test_whatever_a_game_raises_is_an_error_of_its_episode(action, says, instant):
    """OpenEnv answers an `Exception`; a future never ends with `StopIteration`."""
    suite = Counts()
    suite.instant = instant
    session = make_session(suite, call_timeout_seconds=5.0)
    with pytest.raises(EnvError, match=says):
        play(session, action, seed=0)
    assert play(session, "a", seed=0).turn == 1


def test_a_call_that_takes_too_long_is_an_error_and_its_late_end_revives_no_episode():
    session = make_session(call_timeout_seconds=0.2)
    Count.release.clear()
    with pytest.raises(EnvError, match="call_timeout: .*0.2 s"):
        play(session, "hang", seed=0)
    Count.release.set()
    with pytest.raises(EnvError, match="step: expected a running episode, got none"):
        asyncio.run(session.step_async(SimpleNamespace(message="a")))
    assert play(session, "a", seed=0).turn == 1


def test_all_sessions_play_in_one_thread_and_a_closed_one_frees_its_environment_and_stays_closed():
    from epo_trl.lab.serve.server import GameSession, ServedGames

    games = ServedGames(Counts())
    sessions = [GameSession(games) for _ in range(3)]
    Count.threads.clear()
    Count.closed = 0
    for session in sessions:
        play(session, "a", seed=0)
    for session in sessions:
        session.close()
    for call in (sessions[0].reset_async(seed=0), sessions[0].step_async(SimpleNamespace(message="a"))):
        with pytest.raises(EnvError, match="session: .*closed after its idle timeout"):
            asyncio.run(call)
    asyncio.run(games.call(lambda: None))  # after the closes
    assert len(Count.threads) == 1 and Count.closed == 3


def test_tasks_can_be_listed():
    session = make_session()
    assert session.list_splits() == [
        {"name": "train", "type": "train"}, {"name": "iid", "type": "test"}, {"name": "ood", "type": "test"},
    ]  # fmt: skip
    assert session.num_tasks("train") == 3
    assert session.get_task("iid", 1) == {"id": "iid/1", "split": "iid", "index": 1}
    assert [task["id"] for task in session.get_task_range("train", 1)] == ["train/1", "train/2"]
    with pytest.raises(IndexError):
        session.get_task("iid", 2)
