"""Our environments in TRL's plain GRPOTrainer, and TRL's in our trainer: both train, and agree on what is paid."""

from copy import deepcopy

import pytest
import torch
from corridor import CorridorSuite, door_on
from rollout_parts import answer
from tool_worlds import chat_tokenizer, scripted_model, train_with_trl
from trainer_kit import make_config
from word_game import WordGame, reward_func, word_rows

from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.envs.checker import check_text_env
from epo_trl.envs.tools.suite import ToolSuite, tool_call
from epo_trl.envs.toy import ToySuite
from epo_trl.rollout import RolloutSettings
from epo_trl.trainers import EPOTrainer, as_environment_factory, task_dataset

PROMPTS = ["You are an agent that acts by calling tools, and you are given a task. What you see: reason step by step"]


def has_changed(model, before):
    return any(not torch.equal(*pair) for pair in zip(model.parameters(), before.parameters(), strict=True))


# ------------------------------------------------------------------------------------------------------- ours in TRL


def test_an_episode_is_paid_as_ours_is():
    """The right door twice, an invalid action between, and no more after the end."""
    rules = RolloutSettings(max_turns=5, success_reward=10.0, env_reward_weight=1.0, invalid_action_penalty=0.1)
    env = as_environment_factory(CorridorSuite(2), rules)()
    assert env.reset(prompt=[], task_id="train/0", seed=3) == (
        "Your task is to: leave\nYou are in room 1.\nYou can: red, blue"
    )
    assert env.act(door_on(1).upper() + " ") == "You are in room 2.\nYou can: red, blue"
    assert env.act("fly to the moon") == "You are in room 2.\nYou can: red, blue"
    assert env.act(door_on(2)) == "You are out.\nThe episode is over."
    assert (env.won, env.done, env.turns, env.invalid_actions) == (True, True, 3, 1)
    assert env.get_reward() == pytest.approx(10.0 + 1.0 - 0.1)
    with pytest.raises(ValueError, match="The episode is over"):
        env.act("red")
    env.reset(task_id="train/1")
    assert (env.won, env.done, env.turns, env.reward) == (False, False, 0, 0.0)


SUITES = [CorridorSuite(2), ToySuite(), GeneratedAlfworld(n_train=2, n_iid=0, n_ood=0)]


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_an_expert_wins_through_the_tool(suite):
    env = as_environment_factory(suite, RolloutSettings(max_turns=60), describe=lambda seen, info: seen)()
    (task_id,) = suite.demonstration_tasks("train", 20, 1)
    observation = env.reset(task_id=task_id).partition("\n")[2]
    expert = suite.make_expert()
    expert.reset(observation, env.info)
    while not env.done:
        observation = env.act(expert.act(observation, env.info)[1])
    assert (env.won, env.invalid_actions, env.get_reward()) == (True, 0, 10.0)


def test_the_turn_limit_ends_an_episode():
    env = as_environment_factory(ToySuite(), RolloutSettings(max_turns=2))()
    env.reset(task_id="train/0")
    assert not env.act("look around").endswith("over.")
    assert env.act("look around").endswith("The episode is over.")
    assert env.done and not env.won


def test_the_rows_name_the_tasks_and_their_seeds():
    rows = task_dataset(CorridorSuite(3), "iid", prompt="Go.", seed=1)
    assert rows["task_id"] == ["iid/0", "iid/1", "iid/2"] and len(set(rows["seed"])) == 3
    assert rows[0]["prompt"] == [{"role": "user", "content": "Go."}]
    assert task_dataset(CorridorSuite(3), "iid", seed=1)["seed"] == rows["seed"]


def test_what_we_give_to_trl_we_can_take_from_trl():
    factory = as_environment_factory(CorridorSuite(2), RolloutSettings(success_reward=1.0))
    suite = ToolSuite(factory, task_dataset(CorridorSuite(2), "train"), name="there-and-back")
    player = lambda info, rng: tool_call("act", action=rng.choice(["red", "blue"]))  # noqa: E731
    check_text_env(suite.make_env(), suite.task_ids("train")[:2], make_env=suite.make_env, player=player)
    env = suite.make_env()
    env.reset(options={"task_id": "train/1"})
    _, reward, terminated, _, info = env.step(tool_call("act", action=door_on(2)))
    assert (reward, terminated, info["won"]) == (1.0, True, True)


@pytest.mark.slow
def test_trl_s_own_trainer_plays_and_learns_from_a_suite_of_ours(tmp_path):
    suite = CorridorSuite(1)
    call = '<tool_call>\n{{"name": "act", "arguments": {{"action": "{}"}}}}\n</tool_call>'
    right = door_on(1)
    wrong = "red" if right == "blue" else "blue"
    tokenizer = chat_tokenizer([*PROMPTS, call])
    model = scripted_model(tokenizer, [call.format(right), call.format(wrong)])
    before = deepcopy(model)
    world = as_environment_factory(suite, RolloutSettings(max_turns=2, success_reward=1.0))
    rows = task_dataset(suite, "train")
    trainer, logged = train_with_trl(tmp_path, model, tokenizer, 2, train_dataset=rows, environment_factory=world)
    assert [tool.__name__ for tool in trainer.tools] == ["act"]
    # Half of the episodes go through the right door at once.
    assert [line["rewards/SuiteEnvironment/mean"] for line in logged] == [0.5, 0.5]
    assert all(line["tools/failure_frequency"] < 1 for line in logged)
    assert has_changed(model, before)


# ------------------------------------------------------------------------------------------------------- TRL's in ours


@pytest.mark.slow
@pytest.mark.parametrize(("context", "form"), [("windowed", "tags"), ("concatenated", "tool_calls")])
def test_an_environment_of_trl_trains_in_our_rollout(context, form, tmp_path):
    """Two steps with what TRL takes: the class, the rows and the reward function of its documentation."""
    words = ("[crane]", "[crown]", "[cat]")
    if form == "tags":
        said = [answer(tool_call("guess", guess=word)) for word in words]
    else:
        call = "<think>\nhm\n</think>\n\n<tool_call>\n{}\n</tool_call>"
        said = [call.format(tool_call("guess", guess=word)) for word in words]
    tokenizer = chat_tokenizer([*PROMPTS, *said])
    model = scripted_model(tokenizer, said)
    rows = [row for row in word_rows() if row["hidden"] == "crane"]
    suite = ToolSuite(WordGame, rows, reward_funcs=[reward_func])
    config = make_config(
        tmp_path, context=context, action_format=form, prompt_template="tools" if form == "tags" else "tool_calls",
        per_device_train_batch_size=3, num_generations=3, max_steps=2, max_turns=2, max_prompt_length=1024,
        max_completion_length=200, success_reward=0.0, env_reward_weight=1.0, invalid_action_penalty=0.25,
    )  # fmt: skip
    trainer = EPOTrainer(model, suite, args=config, processing_class=tokenizer)
    before = deepcopy(model)
    trainer.train()
    first, second, third = trainer.last_episodes
    assert (first.won, first.total_reward, len(first.turns)) == (True, 1.0, 1)
    # The second row is the first of the second turn, in which two episodes play.
    assert [turn.action for turn in second.turns] == [tool_call("guess", guess=word) for word in ("[crown]", "[crane]")]
    assert (second.won, second.total_reward) == (True, pytest.approx(1.0))
    assert [turn.error for turn in third.turns] == ["You attempted an invalid move.", ""]
    assert third.total_reward == pytest.approx(0.2 - 0.25)
    assert [line["env/invalid_actions"] > 0 for line in trainer.state.log_history if "reward" in line] == [True, True]
    assert has_changed(model, before)
