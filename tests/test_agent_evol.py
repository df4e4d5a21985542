"""AgentEvol: a warm start and two rounds on the small environment of recipes/my_env, and the same command again."""

import importlib.util
import json
import re
import runpy
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from trl import ModelConfig

from epo_trl.cli.evaluation import EvaluationArguments
from epo_trl.envs.toy import ToySuite
from epo_trl.errors import InputError
from epo_trl.rollout.templates import TEMPLATES
from epo_trl.runs.files import what_model
from epo_trl.types import Episode, StopReason, Turn

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "recipes" / "my_env" / "sft_tiny_cpu.yaml"


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def recipe(monkeypatch, capsys):
    """Returns a function that runs a recipe as one types it, in this process: a new one imports for seconds."""

    def run(name, *options):
        path = str(ROOT / "recipes" / name)
        monkeypatch.setattr("sys.argv", [path, "--config", str(CONFIG), "--report_to", "none", *options])
        code = 0
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as exit:
            code = exit.code
        return Done(code, *capsys.readouterr())

    return run


@pytest.mark.slow
def test_a_policy_learns_from_what_it_has_won_and_a_finished_run_is_left_as_it_is(tmp_path, recipe):
    warm, evolved = tmp_path / "warm", tmp_path / "evolved"
    done = recipe("sft.py", "--output_dir", str(warm), "--max_steps", "40")
    assert done.returncode == 0, done.stderr[-3000:]
    options = [
        "--model_name_or_path", str(warm), "--output_dir", str(evolved), "--rounds", "2", "--samples", "24",
        "--max_steps", "4", "--max_completion_length", "20", "--protocol", "alfworld-tiny20",
    ]  # fmt: skip
    done = recipe("agent_evol.py", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    for number, player in ((1, warm), (2, evolved / "round-1")):
        folder = evolved / f"round-{number}"
        found = json.loads((folder / "successes_0.json").read_text())
        assert found["settings"]["policy"] == what_model(str(player)) and found["played"] == 24
        assert 0 < len(found["won"]) <= 24 and all(
            prompt and response for turns in found["won"] for prompt, response in turns
        )
        assert f"round-{number}: {len(found['won'])} of 24 episodes won" in done.stdout
        assert "AgentEvol" in (folder / "README.md").read_text()
    for number in (0, 1, 2):
        tested = json.loads((evolved / "evaluations" / f"step_{number:06d}.json").read_text())
        assert tested["step"] == number
        assert [(one["split"], one["episodes"]) for one in tested["reports"]] == [("iid", 20), ("ood", 20)]
    before = {path: path.read_bytes() for path in evolved.rglob("*") if path.is_file()}
    moved = warm.rename(tmp_path / "elsewhere")
    options[1] = str(moved)
    again = recipe("agent_evol.py", *options)
    assert again.returncode == 0, again.stderr[-3000:]
    assert before == {path: path.read_bytes() for path in evolved.rglob("*") if path.is_file()}
    other = recipe("agent_evol.py", *options[:-1], "alfworld50")
    assert other.returncode == 1 and re.search("protocol: expected alfworld-tiny20 .*got alfworld50", other.stderr)
    other = recipe("agent_evol.py", *options, "--samples", "25")
    assert other.returncode == 1 and "samples: " in other.stderr and "played with other settings" in other.stderr


@pytest.mark.slow
def test_what_would_go_wrong_after_hours_of_play_is_said_first(tmp_path, recipe, monkeypatch):
    warm = tmp_path / "warm"
    assert recipe("sft.py", "--output_dir", str(warm), "--max_steps", "1").returncode == 0
    options = ["--model_name_or_path", str(warm), "--output_dir", str(tmp_path / "evolved"), "--samples", "4"]
    untrained = recipe("agent_evol.py", "--output_dir", str(tmp_path))
    assert untrained.returncode == 1 and "expected a warm start, see recipes/sft.py, got an unt" in untrained.stderr
    for check in ([], ["--check"]):
        cut = recipe("agent_evol.py", *options, "--max_completion_length", "500", *check)
        assert cut.returncode == 1 and "max_length: expected 628 or more" in cut.stderr and "got 160" in cut.stderr
    whole = ["--context", "concatenated", "--prompt_template", "plain", "--max_prompt_length", "70"]
    cut = recipe("agent_evol.py", *options, "--max_completion_length", "20", "--max_length", "100", *whole)
    assert cut.returncode == 1 and re.search("max_length: expected 104 .*got 100: .* demonstrations are", cut.stderr)
    assert not (tmp_path / "evolved").exists() or not list((tmp_path / "evolved").rglob("successes_*"))
    monkeypatch.setattr("epo_trl.rollout.running_episode.RunningEpisode.to_episode", aborted_episode)
    down = recipe("agent_evol.py", *options, "--max_completion_length", "20")
    assert down.returncode == 1 and "4 of 4 episodes were aborted, and none is kept: " in down.stderr
    assert "the server is down" in down.stderr and not list((tmp_path / "evolved").rglob("successes_*"))


def test_cached_successes_are_those_of_the_same_prompts_and_tasks(tmp_path, monkeypatch):
    evolution = module_of("agent_evol.py")
    turn = Turn((1,), (2,), response="", observation="", action="", is_valid=True)
    rounds = iter([[Episode("train/0", "t", "t", (turn,), StopReason.WON, won=True)]])
    monkeypatch.setattr(evolution, "play_round", lambda *_: next(rounds))  # plays once
    words = shutil.copytree(TEMPLATES / "react", tmp_path / "words")
    options = evolution.EvolutionArguments(samples=1, prompt_template=str(words))
    suite, player, args = ToySuite(), ModelConfig("m"), EvaluationArguments()
    collect = partial(evolution.collect_successes, str(tmp_path / "round-1"), suite, player, options, args, None)
    assert collect()["input_ids"] == collect()["input_ids"] == [[1, 2]]
    before = (words / "next.txt").read_text()
    (words / "next.txt").write_text(f"{before} Hurry!")
    with pytest.raises(InputError, match="^template: .* was played with other settings; use another output_dir"):
        collect()
    (words / "next.txt").write_text(before)
    for name in ("task_ids", "content"):
        with monkeypatch.context() as patch, pytest.raises(InputError, match="^tasks: .* other settings"):
            patch.setattr(suite, name, lambda split: ["another"])
            collect()
    collect()


@pytest.mark.parametrize(
    ("settings", "dtype"), [({"load_in_4bit": True}, "bfloat16"), ({"load_in_8bit": True}, "bfloat16"), ({}, "auto")]
)
def test_quantized_weights_are_played_in_the_precision_of_training(settings, dtype):
    make_player = runpy.run_path(str(ROOT / "recipes" / "agent_evol.py"))["make_player"]
    assert make_player(ModelConfig("m", dtype="bfloat16", use_peft=True, **settings)).dtype == dtype


def module_of(name):
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / "recipes" / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def aborted_episode(self):
    return Episode(self.task_id, "t", "t", (), StopReason.ABORTED, error="the server is down")
