"""`epo-trl play`: what is played is what an evaluation plays, and what is said is shown, never obeyed."""

import io
import sys

import pytest
from random_policy import TOKENIZER, TOY, RandomPolicy
from rollout_parts import byte_tokenizer
from trl import ModelConfig

from epo_trl.cli import evaluation
from epo_trl.envs.toy import ToySuite
from epo_trl.evaluation.play import protocol_context, protocol_settings
from epo_trl.lab import play as playing
from epo_trl.lab.play import PLAIN, PlayArguments, play
from epo_trl.rollout import PromptTemplate, play_episodes
from epo_trl.rollout.spec import ResponseArguments


@pytest.fixture
def show(capsys):
    """Returns a function that plays and returns the episode and all that was written."""

    def run(suite=None, *, model=None, **args):
        episode = play(suite or ToySuite(), PlayArguments(**args), ModelConfig(model))
        return episode, capsys.readouterr().out

    return run


@pytest.fixture
def chat_model(monkeypatch):
    monkeypatch.setattr(playing, "tokenizer_of", lambda *_: byte_tokenizer())


@pytest.fixture
def types(monkeypatch):
    """Returns a function that sets what the person will type."""
    return lambda *lines: monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


# ---------------------------------------------------------------------------------------------------- the three players


def test_the_expert_plays_its_game_to_the_end(show):
    """The second task of the list is won by hand: its boxes are opened in the order of the list."""
    episode, written = show(player="expert", index=1)
    suite, expert = ToySuite(), ToySuite().make_expert()
    env = suite.make_env()
    observation, info = env.reset(options={"task_id": "train/1"})
    actions, over = [], False
    while not over:
        actions.append(expert.act(observation, info)[1])
        observation, reward, over, _, info = env.step(actions[-1])
        assert observation in written
    assert [turn.action for turn in episode.turns] == actions and episode.won and reward == 1
    assert [line for line in written.splitlines() if "> " in line] == [f"{i}> {a}" for i, a in enumerate(actions, 1)]
    assert written.endswith(f"reward 1\nwon after {len(actions)} turns; reward 1\n")


def test_a_person_types_actions_or_asks_for_them(show, types):
    types("/actions", "", "/9", "help", "look", "LOOK", "fly away", "/1", "/quit")
    episode, written = show(task_id="train/0")
    first = ToySuite().make_env().reset(options={"task_id": "train/0"})[1]["admissible_actions"]
    assert episode is None and written.endswith("stopped after 5 turns; reward 0\n")
    for number, action in enumerate(first, start=1):
        assert f"\n{number:4}  {action}\n" in written or f"> {number:4}  {action}\n" in written
    asked = "at the start, for nothing typed, and for a number that is not there"
    assert written.count("Type an action, or: /actions") == 3, asked
    assert written.count("invalid: not an admissible action") == 2, (
        "help and fly away; small and large letters do not matter"
    )
    assert f"You open the {first[0].removeprefix('open ')}." in written


@pytest.mark.parametrize("context", ["windowed", "concatenated"])
def test_a_model_plays_as_in_an_evaluation(show, monkeypatch, context):
    monkeypatch.setattr(evaluation, "load", lambda *_: (RandomPolicy(), TOKENIZER, None))
    rules = dict(max_turns=9, context=context, seed=4)
    episode, written = show(player="some/model", split="iid", index=7, max_prompt_length=9999, **rules)
    protocol = PLAIN.varied(max_turns=9, context=context)
    options = ResponseArguments(max_prompt_length=9999)
    prompts = protocol_context(protocol, options, ToySuite(), TOKENIZER)
    prompts.end_ids = RandomPolicy.eos_ids
    (expected,) = play_episodes(
        [ToySuite().make_env()], [("iid/7", 4)], RandomPolicy(seed=4), prompts, protocol_settings(protocol)
    )
    assert episode == expected and 0 < episode.invalid_actions < 9
    assert "player: some/model" in written and "at most 9 turns" in written
    assert written.count("invalid: ") == episode.invalid_actions
    assert written.endswith(f"(turn_limit) after 9 turns; reward 0; invalid actions: {episode.invalid_actions}\n")


# ------------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.usefixtures("chat_model")
def test_the_prompt_is_the_template_s_text_and_with_a_model_s_tokenizer_what_that_reads(show):
    env = ToySuite().make_env()
    observation, info = env.reset(options={"task_id": "train/0"})
    listed = ", ".join(info["admissible_actions"])
    first = PromptTemplate.load("general").first.format(
        task=info["task"], observation=observation, admissible_actions=listed
    )
    general = {"player": "expert", "show_prompt": True, "prompt_template": "general"}
    assert first in show(**general)[1]
    framed = show(**general, model="some/model", max_prompt_length=9999)[1]
    assert f"<|im_start|>user\n{first}<|im_end|>\n<|im_start|>assistant\n" in framed
    assert "im_start" not in show(**general, model="tiny")[1]
    growing = show(**general, model="some/model", context="concatenated", max_prompt_length=9999)[1]
    assert "\n<|im_end|>\n<|im_start|>user\n" in growing and growing.count(first) == 1


# ------------------------------------------------------------------------------------------------- what is said is data

HOSTILE = "\x1b[2J\x1b]0;title\x07[red]all[/red]\x9b31m\u202e"


class HostileEnv(ToySuite().make_env().__class__):
    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        said = {"task": HOSTILE, "task_type": HOSTILE, "score": 0}
        self.said = {**info, **said, "admissible_actions": (*info["admissible_actions"], HOSTILE)}
        return HOSTILE, self.said

    def step(self, action):
        return HOSTILE, 0.0, False, True, self.said


class HostileSuite(ToySuite):
    def make_env(self):
        return HostileEnv()


def test_what_an_environment_says_is_shown_and_not_obeyed(show, types):
    types("/actions", "look")
    episode, written = show(HostileSuite(), show_prompt=True)
    assert episode.stop == "truncated"
    for obeyed in ("\x1b", "\x07", "\x9b", "\u202e"):
        assert obeyed not in written
    assert written.count("\\x1b[2J\\x1b]0;title\\x07[red]all[/red]\\x9b31m\\u202e") >= 5


# ---------------------------------------------------------------------------------------------------------- the command


def test_every_environment_can_be_played_from_the_command_line(command):
    assert command("play") == command("play", "--help") and "usage: epo-trl play " in command("play")[1]
    code, out, _ = command("play", "trap", "--player", "expert", "--rooms", "2")
    assert code == 0 and out.endswith("won after 2 turns; reward 1\n")
    code, out, _ = command("play", TOY, "--player", "expert", "--split", "ood", "--show-prompt")
    assert code == 0 and "won after" in out and "What you see: " in out


@pytest.mark.games
def test_an_evaluation_s_config_says_how_its_prompts_look(command):
    words = ("--config", "alfworld/eval_tiny_cpu", "--player", "expert", "--split", "iid", "--show_prompt")
    code, out, _ = command("play", *words)
    assert code == 0 and "won after" in out and "at most 20 turns" in out
