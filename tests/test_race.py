"""The race against other trainers: the same texts and settings for all, and the numbers of its table."""

import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
from trl import GRPOConfig

from epo_trl.models import build_tokenizer
from epo_trl.rollout import ContextBuilder
from epo_trl.rollout.context import TurnView
from epo_trl.trainers import EPOConfig

MODULES = ("clock", "evaluate", "games", "ours", "report", "settings", "trl_grpo", "warm_start")


@pytest.fixture
def race(monkeypatch):
    """Imports a module of benchmarks/race, whose names are short, for one test only."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks" / "race"))
    before = {name: sys.modules.pop(name, None) for name in MODULES}
    yield import_module
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def test_trl_s_conversation_has_the_token_ids_of_ours(race):
    """An episode of the expert: as TRL's loop builds it from the chat template, and as our context does."""
    games, warm_start = race("games"), race("warm_start")
    suite = games.make_suite()
    task = suite.task_ids("train")[0]
    house, env, expert = games.House(suite), suite.make_env(), suite.make_expert(0)
    observation, info = env.reset(seed=0, options={"task_id": task})
    expert.reset(observation, info)
    messages = [{"role": "user", "content": house.reset(task_id=task, seed=0)}]
    steps = []
    while not house.done:
        action = expert.act(observation, info)[1]
        steps.append((observation, info, action))
        observation, *_, info = env.step(action)
        call = {"type": "function", "function": {"name": "act", "arguments": {"action": action}}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "act", "content": house.act(action)},
        ]
    assert (house.won, house.reward, messages[-1]["content"]) == (True, 1.0, games.OVER)

    tokenizer = build_tokenizer([*(m["content"] for m in messages), *(action for *_, action in steps)])
    tokenizer.chat_template = warm_start.CHAT_TEMPLATE
    theirs = tokenizer.apply_chat_template(messages[:-1], tokenize=True, return_dict=False)
    context = ContextBuilder(tokenizer, games.TEMPLATE, mode="concatenated")
    ours, answer = [], []
    for number, (seen, known, action) in enumerate(steps):
        view = TurnView(seen, known, history=[("", "")] * number, last_response_ids=answer, context_tokens=len(ours))
        (prompt,) = context.build([view])
        answer = tokenizer(f"<action> {action} </action>", add_special_tokens=False)["input_ids"]
        answer.append(tokenizer.eos_token_id)
        ours += prompt.ids + answer
    assert tokenizer.unk_token_id not in ours and ours == theirs


def test_both_trainers_have_the_same_settings(race, tmp_path):
    given = race("settings").trainer_settings(tmp_path, 0)
    theirs, ours = GRPOConfig(**given), EPOConfig(**given)
    # of an episode there, of a response here; of evaluation, vLLM and resumed callbacks, which the race does not use
    differ = {"max_completion_length", "num_generations_eval", "vllm_importance_sampling_mode"}
    differ |= {"restore_callback_states_from_checkpoint"}
    names = [each.name for each in fields(GRPOConfig) if each.init and each.name not in differ]
    assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
