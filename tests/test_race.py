"""The race against other trainers: the same texts and settings for all, and the numbers of its table."""

import json
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
from trl import GRPOConfig

from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.models import build_model, build_tokenizer
from epo_trl.models.load import corpus
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


def test_trl_reads_the_answers_that_the_model_is_taught(race):
    from trl.chat_template_utils import parse_response, supports_tool_calling

    tokenizer = build_tokenizer(["go to drawer 1 user holding nothing"])
    tokenizer.chat_template = race("warm_start").CHAT_TEMPLATE
    tokenizer.response_template = race("trl_grpo").RESPONSE
    assert supports_tool_calling(tokenizer)

    def read(text):
        prompt = "<|im_start|>user holding nothing <|im_end|><|im_start|>assistant "
        prefix, ids = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, text))
        return [call["function"] for call in parse_response(tokenizer, ids, prefix=prefix).get("tool_calls", [])]

    call = {"name": "act", "arguments": {"action": "go to drawer 1"}}
    assert read("<action> go to drawer 1 </action><|im_end|>") == [call]
    assert read("<|im_end|>") == read("go to drawer 1 <|im_end|>") == []


def test_a_checkpoint_plays_the_test_games_to_the_turn_limit(race, tmp_path, monkeypatch):
    games, evaluate = race("games"), race("evaluate")
    suite = GeneratedAlfworld(1, 1, 0, task_types=["pick_and_place_simple"], max_receptacles=8)
    tokenizer = build_tokenizer([*corpus(suite, games.PROMPT), games.OVER])
    tokenizer.chat_template = race("warm_start").CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    build_model(tokenizer, seed=0).save_pretrained(tmp_path)
    monkeypatch.setattr(evaluate, "make_suite", lambda: suite)
    assert evaluate.play(tmp_path, 2) == {"games": 2, "won": 0, "turns": games.TURNS}


def test_both_trainers_have_the_same_settings(race, tmp_path):
    given = race("settings").trainer_settings(tmp_path, 0)
    theirs, ours = GRPOConfig(**given), EPOConfig(**given)
    # of an episode there, of a response here; of evaluation, vLLM and resumed callbacks, which the race does not use
    differ = {"max_completion_length", "num_generations_eval", "vllm_importance_sampling_mode"}
    differ |= {"restore_callback_states_from_checkpoint"}
    names = [each.name for each in fields(GRPOConfig) if each.init and each.name not in differ]
    assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}


def test_the_clock_leaves_saving_out_and_ends_a_run(race, tmp_path, monkeypatch):
    clock_module = race("clock")
    now = [0.0]
    monkeypatch.setattr(clock_module.time, "process_time", lambda: now[0])
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: 2 * now[0])
    clock = clock_module.Clock(tmp_path, budget=10.0, marks=2, most=99)
    clock.start()

    def save(folder):
        folder.mkdir()
        now[0] += 100.0

    for seconds in (3.0, 3.0, 3.0, 3.0):
        now[0] += seconds
        clock.tick([True, False], save)
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [row["cpu"] for row in rows] == [3.0, 6.0, 9.0, 12.0]
    assert [row["wall"] for row in rows] == [6.0, 12.0, 18.0, 24.0]
    assert sorted(folder.name for folder in tmp_path.glob("at-*")) == ["at-4", "at-8"]
    assert clock.is_over and rows[-1]["episodes"] == 8


def test_the_table_has_medians_over_seeds(race):
    report = race("report")

    def run(seconds, wins):
        return {
            "steps": [
                {"step": i + 1, "episodes": 4 * (i + 1), "cpu": seconds * (i + 1), "wall": 0.0, "success": win}
                for i, win in enumerate(wins)
            ],
            "tests": [{"won": 3, "games": 4}],
        }

    found = {
        "trl_grpo": [run(10.0, [0.0, 0.5]), run(12.0, [0.0, 0.5]), run(20.0, [0.0, 0.5])],
        "ours_grpo": [run(3.0, [0.25, 0.75, 1.0])] * 3,
        "agilerl_ppo": [run(30.0, [0.0])],  # too short for a comparison of learning
    }
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in report.table(found).splitlines()[2:]]
    won = ["50% (50% to 50%)", "25% (25% to 25%)", "75% (75% to 75%)"]
    assert rows[0] == ["TRL, GRPO", "12.00 (10.00 to 20.00)", "2 (2 to 2)", *won]
    assert rows[1][1:3] == ["3.00 (3.00 to 3.00), 4.0x as fast", "3 (3 to 3)"]
    assert rows[1][3:] == ["75% (75% to 75%)", "67% (67% to 67%)", "75% (75% to 75%)"]
    assert rows[2] == ["AgileRL, PPO per turn", "30.00 (30.00 to 30.00)", "1 (1 to 1)", "", "", ""]
