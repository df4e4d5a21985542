"""Environments of TRL's `environment_factory` keep our contract; their calls are checked, their rewards are TRL's."""

import asyncio
import random
from pathlib import Path
from typing import Literal

import pytest
from word_game import WORDS, WordGame, reward_func, word_rows

from epo_trl.envs import EnvError
from epo_trl.envs.testing import EnvContract
from epo_trl.envs.tools.suite import ToolsArguments, ToolSuite, tool_call
from epo_trl.envs.tools.tool import Refusal, Tool
from epo_trl.rollout import PromptTemplate
from epo_trl.rollout.templates import render

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "recipes" / "tools"


def guess_a_number(info, rng):
    return tool_call("guess", number=rng.randint(1, 8))


def guess_a_word(info, rng):
    return tool_call("guess", guess=f"[{rng.choice(WORDS)}]")


class TestHighLow(EnvContract):
    """The example of recipes/tools, by the names of its config."""

    expert_turns = 8
    player = guess_a_number

    @pytest.fixture(autouse=True)
    def example(self, monkeypatch):
        monkeypatch.syspath_prepend(str(EXAMPLE))

    def make_suite(self):
        return ToolsArguments(
            factory="high_low:HighLow", rows="high_low:train_rows", iid_rows="high_low:test_rows",
            demonstrator="high_low:Expert",
        ).make_suite()  # fmt: skip


class TestWordGame(EnvContract):
    expert_turns = None
    player = guess_a_word

    def make_suite(self):
        return ToolSuite(WordGame, word_rows(), reward_funcs=[reward_func])


def started(suite, task_id="train/0", **kwargs):
    env = suite.make_env()
    return env, *env.reset(options={"task_id": task_id}, **kwargs)


# -------------------------------------------------------------------------------------------------- prompts and calls


def test_the_prompt_shows_the_task_the_tools_and_what_reset_says():
    _, observation, info = started(ToolSuite(WordGame, word_rows(), reward_funcs=[reward_func]))
    fields = {**info, "observation": observation, "turn": 1, "turns_taken": 0}
    template = PromptTemplate.load("tools")
    template.check(info)
    shown = render(template.first, fields)
    assert "Your task is to: You solve Wordle.\n\nPlay one game." in shown
    assert "guess(guess: str) -> str\nMake a guess.\n\nArgs:\n    guess: The guessed word, formatted as" in shown
    assert "What you see: You have 3 guesses." in shown
    assert '<action>{"name": "the tool", "arguments": {"an argument": "its value"}}</action>' in shown
    PromptTemplate.load("tool_calls").check(info)


@pytest.mark.parametrize(
    ("action", "refusal"),
    [
        ("guess crane", "this is no tool call; write one as"),
        ('{"name": "reset", "arguments": {}}', "there is no tool of this name"),
        ("[" * 100_000, "this is no tool call"),
        ('{"name": "guess", "arguments": {"guess": NaN}}', "guess: the argument 'guess' got NaN"),
        ('{"name": "__init__", "arguments": {}}', "there is no tool of this name"),
        ('{"name": "guess"}', "guess lacks the argument 'guess'"),
        ('{"name": "guess", "arguments": {"guess": 3}}', "guess: the argument 'guess' got 3: Input should be a valid"),
        ('{"name": "guess", "arguments": {"guess": "[crane]", "self": 1}}', "guess has no argument \"self\"; it takes"),
        ('{"name": "guess", "arguments": {"guess": "[cat]"}}', "You attempted an invalid move."),
        ('{"name": "guess", "arguments": {"guess": "\\ud800"}}', "guess: the argument 'guess' got \"?\""),
    ],
)  # fmt: skip
def test_a_call_that_is_not_right_is_an_invalid_action_with_a_reason_and_changes_nothing(action, refusal):
    env, *_ = started(ToolSuite(WordGame, word_rows(), reward_funcs=[reward_func]))
    before = vars(env.world).copy()
    observation, reward, terminated, truncated, info = env.step(action)
    assert (reward, terminated, truncated, info["accepted"], info["won"]) == (0.0, False, False, False, False)
    assert info["refusal"].startswith(refusal)
    assert observation == f"Error: {info['refusal']}"
    observation.encode()  # can be shown
    assert vars(env.world) == before


def every_kind(a: int, b: float, c: Literal["x", "y"], d: list[int], e: bool = True, f: str | None = None) -> str:
    """Does nothing."""


@pytest.mark.parametrize(
    ("argument", "value", "takes"),
    [
        ("a", 3, True), ("a", "3", False), ("a", True, False), ("b", 3, True), ("c", "z", False),
        ("d", [1, "2"], False), ("e", 0, False), ("f", None, True),
    ],
)  # fmt: skip
def test_an_argument_has_to_be_of_its_type(argument, value, takes):
    given = {"a": 1, "b": 1.0, "c": "x", "d": [], argument: value}
    if takes:
        assert Tool.of(every_kind).checked(given) == given
    else:
        with pytest.raises(Refusal, match=f"every_kind: the argument '{argument}' got"):
            Tool.of(every_kind).checked(given)


# ------------------------------------------------------------------------------------------------------------- rewards


class Scored:
    """Sets its score."""

    def reset(self, **row):
        self.score = row.get("start", 0.0)

    def set(self, score: float) -> None:
        """Sets it.

        Args:
            score: The score
        """
        self.score = score

    def get_reward(self):
        return self.score


class Ending(Scored):
    def reset(self, **row):
        super().reset(**row)
        self.done = False

    def end(self) -> str:
        """Ends the episode."""
        self.done = True
        return "over"


def test_the_rewards_of_an_episode_sum_to_what_trl_would_pay_at_its_end():
    env, observation, _ = started(ToolSuite(Scored, [{"start": 0.3}]))
    assert observation == "Nothing has happened yet."
    steps = [env.step(tool_call("set", score=score)) for score in (0.5, 0.2, -1.0)]
    assert [step[1] for step in steps] == pytest.approx([0.5, -0.3, -1.2])
    assert sum(step[1] for step in steps) == pytest.approx(env.world.get_reward())
    assert [step[0] for step in steps] == ["(nothing)"] * 3 and steps[-1][4]["score"] == -1.0


@pytest.mark.parametrize(
    ("kind", "won_score", "calls", "expected"),
    [
        (Scored, 1.0, [("set", {"score": 1.0})], (True, True)),
        (Scored, 2.0, [("set", {"score": 1.0})], (False, False)),
        (Scored, None, [("set", {"score": 9.0})], (False, False)),
        (Ending, 1.0, [("set", {"score": 1.0})], (False, False)),
        (Ending, 1.0, [("set", {"score": 1.0}), ("end", {})], (True, True)),
        (Ending, 1.0, [("end", {})], (True, False)),
        (Ending, None, [("set", {"score": 1.0}), ("end", {})], (True, False)),
    ],
)
def test_an_episode_is_over_when_the_environment_is_done_or_else_at_the_winning_score(kind, won_score, calls, expected):
    env, *_ = started(ToolSuite(kind, won_score=won_score))
    *_, (_, _, terminated, truncated, info) = [env.step(tool_call(name, **arguments)) for name, arguments in calls]
    assert (terminated, info["won"], truncated) == (*expected, False)
    if terminated:
        with pytest.raises(EnvError, match="no episode is running"):
            env.step(tool_call("set", score=0.0))


def test_reward_functions_get_what_trl_gives_them_and_none_is_left_out():
    seen = []

    def judge(prompts, completions, environments, hidden, **rest):
        seen.append((prompts, completions, hidden, rest))
        return [0.25]

    row = word_rows()[0]
    env, *_ = started(ToolSuite(WordGame, [row], reward_funcs=[reward_func, judge, lambda **_: [None]]))
    assert env.step("crane?")[1] == 0.25
    assert env.step(tool_call("guess", guess="[crown]"))[1] == pytest.approx(0.2)  # c and r are in place
    prompts, completions, hidden, rest = seen[-1]
    call = {"type": "function", "function": {"name": "guess", "arguments": {"guess": "[crown]"}}}
    assert (prompts, hidden, rest) == ([row["prompt"]], ["crane"], {})
    assert completions == [
        [
            {"role": "assistant", "content": "crane?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "guess", "content": "GGXXX"},
        ]
    ]


# ------------------------------------------------------------------------------------------------- what may go wrong


class Failing(Scored):
    def refuse(self) -> str:
        """Refuses."""
        raise ValueError("Game over.")

    def stumble(self) -> str:
        """Has a bug, or the agent's argument was out of range."""
        raise IndexError("list index\x1b out of range")

    def lose(self) -> str:
        """Has lost its server."""
        raise ConnectionError("the server is gone")

    async def wait(self, seconds: float) -> str:
        """Waits.

        Args:
            seconds: How long
        """
        await asyncio.sleep(seconds)
        return f"waited {seconds} seconds"

    def show(self) -> list:
        """Shows blocks of text."""
        return [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def test_an_exception_of_a_tool_is_its_answer_and_a_lost_connection_is_an_error():
    env, *_ = started(ToolSuite(Failing))
    assert env.step(tool_call("refuse"))[4]["refusal"] == "Game over."
    with pytest.warns(UserWarning, match=r"'stumble' raised IndexError: list index\\x1b out.*raises ValueError"):
        assert env.step(tool_call("stumble"))[0] == "Error: list index\x1b out of range"
    with pytest.raises(ConnectionError):
        env.step(tool_call("lose"))


def test_asynchronous_tools_and_blocks_of_text_are_taken():
    env, *_ = started(ToolSuite(Failing))
    assert env.step(tool_call("wait", seconds=0.01))[0] == "waited 0.01 seconds"
    assert env.step(tool_call("show"))[0] == "one\ntwo"


def test_the_final_answer_is_a_tool_that_ends_the_episode():
    suite = ToolSuite(Scored, final_answer=True)
    env, _, info = started(suite)
    assert [tool.__name__ for tool in suite.tools][-1] == "final_answer" == list(env.tools)[-1]
    assert any(tool.startswith("final_answer(answer: str)") for tool in info["tools"])
    observation, _, terminated, _, info = env.step(tool_call("final_answer", answer="42"))
    assert (observation, terminated, info["won"]) == ("The episode is over.", True, False)


class Drawing(Scored):
    """Draws its tasks itself.

    This is not part of the task.
    """

    def reset(self, seed=None):
        self.score = 0.0
        return f"drew {random.Random(seed).random()}"


def test_an_environment_without_rows_gets_the_seed_if_it_takes_one_and_says_its_task_itself():
    suite = ToolSuite(Drawing)
    assert len(suite.task_ids("train")) == 100 and suite.splits == ("train",)
    _, one, info = started(suite, seed=3)
    assert one == started(suite, seed=3)[1] != started(suite, seed=4)[1]
    assert len({started(suite, task, seed=3)[1] for task in suite.task_ids("train")}) == 100  # as a trainer resets them
    assert info["task"] == "Draws its tasks itself."


class Rewardless:
    def reset(self, **row): ...

    def act(self) -> str:
        """Acts."""


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (Rewardless, "factory: Rewardless has no get_reward"),
    ],
)
def test_a_factory_that_cannot_work_is_refused(factory, says):
    with pytest.raises(EnvError, match=says):
        ToolSuite(factory, [{}]).make_env().reset(options={"task_id": "train/0"})


def test_rows_may_be_a_file_and_test_lists_are_those_that_are_given(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"hidden": "crane\u2028"}\n\n{"hidden": "slate", "task_type": "hard"}\n')
    suite = ToolsArguments(
        factory="word_game:WordGame", rows=str(tmp_path / "rows.jsonl"), ood_rows="word_game:word_rows",
        tool_rewards=["word_game:reward_func"],
    ).make_suite()  # fmt: skip
    assert suite.splits == ("train", "ood") and suite.name == "WordGame"
    _, _, info = started(suite, "train/1")
    assert (info["task"], info["task_type"]) == ("Guess a word of five letters.", "hard")
