"""A recipe as one types it: its configs, its help, and errors as one line."""

import re
import runpy
import warnings
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from trl import ModelConfig
from typed import parse_recipe

from epo_trl.cli import base
from epo_trl.cli.imitation import ImitationConfig
from epo_trl.cli.options import AlgorithmArguments, list_configs, parse_options
from epo_trl.cli.program import run_recipe
from epo_trl.envs.base import EnvError
from epo_trl.trainers import EPOConfig, EPOPPOConfig

ROOT = Path(__file__).parents[1]
TINY = ROOT / "recipes" / "alfworld" / "tiny_cpu.yaml"


@pytest.fixture
def typed(capsys):
    """Returns a function that runs a `main` as a recipe and returns `(exit code, stdout, stderr)`."""

    def run(main, *arguments):
        return run_recipe("train", "mine.py", arguments, main), *capsys.readouterr()

    return run


def parse(*argv, types=(EPOConfig, ModelConfig, AlgorithmArguments), environment="alfworld"):
    return parse_recipe(*types, environment=environment, argv=argv)


def test_a_recipe_alone_lists_its_configs_with_what_each_is(typed):
    code, out, err = typed(lambda line: pytest.fail("nothing was asked for"))
    listed = dict(re.findall(r"^  (\S+) +([A-Z].*\.)$", out, re.MULTILINE))
    assert (code, err, listed.keys()) == (0, "", list_configs("train").keys())


# ----------------------------------------------------------------------------------------------------------- errors


def wrong_environment(line):
    raise EnvError("games: got '\x1b[31mred\u202e',\n takes another")


def test_an_error_of_ours_is_one_line_without_traceback_or_commands_for_the_terminal(typed):
    assert typed(wrong_environment, "--config", str(TINY)) == (
        1, "", r"mine.py: error: games: got '\x1b[31mred\u202e', takes another" + "\n",
    )  # fmt: skip
    with pytest.raises(EnvError):
        typed(wrong_environment, "--config", str(TINY), "--traceback")


@pytest.mark.parametrize(
    "bug", [lambda line: {}["x"], lambda line: int("x"), lambda line: torch.zeros(2) @ torch.zeros(3)]
)
def test_a_bug_keeps_its_traceback(bug, typed):
    with pytest.raises((KeyError, ValueError, RuntimeError)):
        typed(bug, "--config", str(TINY))


@pytest.mark.parametrize(("rank", "waits"), [("0", []), ("1", [60.0])])
def test_ranks_with_the_same_error_leave_it_to_the_first(rank, waits, typed, monkeypatch):
    """The launcher ends the others while they wait; one that is alone with its error still says it."""
    slept = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(base.time, "sleep", slept.append)
    assert "takes another" in typed(wrong_environment, "--config", str(TINY))[2]
    assert slept == waits


# ---------------------------------------------------------------------------------------------------------- options


@pytest.mark.skipif(torch.accelerator.is_available(), reason="bf16 stays on there")
@pytest.mark.parametrize("kind", [EPOConfig, ImitationConfig])
def test_a_config_that_says_nothing_about_precision_runs_on_this_machine_and_warns_of_nothing(kind, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, args, *_ = parse("--games", "generated", "--output_dir", str(tmp_path), types=(kind, ModelConfig))
    assert args.bf16 is False
    assert args.activation_checkpointing is args.gradient_checkpointing is True  # TRL's default, by both its names


def test_the_config_may_follow_an_equals_sign_and_a_word_in_braces_is_a_word():
    _, args, *_ = parse(f"--config={TINY}", "--max_turns=7", "--run_name", "{seed}")
    assert (args.max_turns, args.run_name) == (7, "{seed}")


def test_the_help_has_each_option_of_ours_once_and_the_whole_help_all_others_too(capsys):
    texts = []
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            parse(option, "--games", "generated", types=(AlgorithmArguments, EPOPPOConfig, ModelConfig))
        texts.append(capsys.readouterr().out)
    short, whole = re.findall(r"(?<!\S)(\w+)=", texts[0]), re.findall(r"^  --(\w+)", texts[1], re.MULTILINE)
    ours = {field.name for kind in EPOPPOConfig.__mro__ if kind.__module__.startswith("epo_trl") and is_dataclass(kind)
            for field in fields(kind) if field.name in vars(kind).get("__annotations__", {})}  # fmt: skip
    assert len(short) == len(set(short)) and {"games", *ours} <= set(short)
    assert texts[0].count("\n") < 40 and "games=generated" not in texts[0] and "require_think=True" in texts[0]
    assert set(whole) - set(short) >= {"max_steps", "beta", "model_name_or_path"}
    assert all("--accelerate_config" in text and "--check" in text for text in texts)


@pytest.mark.parametrize(("world", "option"), [("alfworld", "games"), ("scienceworld", "jvms")])
@pytest.mark.parametrize(("algorithm", "critic"), [("grpo", False), ("ppo", True)])
def test_a_named_recipe_has_the_options_of_its_environment_and_algorithm(
    world, option, algorithm, critic, monkeypatch, capsys
):
    recipe = ROOT / "recipes" / f"{world}_{algorithm}_epo.py"
    monkeypatch.setattr("sys.argv", [str(recipe), "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(recipe), run_name="__main__")
    text = capsys.readouterr().out
    assert re.search(rf"\s{option}=", text) and bool(re.search(r"\scritic=", text)) is critic


@pytest.mark.parametrize("config", ["scienceworld/tiny_cpu", "alfworld/ppo_tiny_cpu"])
def test_a_recipe_refuses_a_config_for_another_environment_or_algorithm(config, monkeypatch, capsys):
    recipe = str(ROOT / "recipes" / "alfworld_grpo_epo.py")
    monkeypatch.setattr("sys.argv", [recipe, "--config", str(ROOT / "recipes" / f"{config}.yaml")])
    with pytest.raises(SystemExit, match="^1$"):
        runpy.run_path(recipe, run_name="__main__")
    assert ": no option of alfworld_grpo_epo.py" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ configs alone


def test_configs_are_read_without_running_anything(typed, tmp_path):
    def main(line):
        parse_options(line, EPOConfig, ModelConfig, AlgorithmArguments)
        pytest.fail("it was asked to read the config only")

    wrong, worse = tmp_path / "wrong.yaml", tmp_path / "worse.yaml"
    wrong.write_text(TINY.read_text() + "epo_lamda: 1\n")
    worse.write_text(re.sub("n_iid: .*", "n_iid: -1", TINY.read_text()))
    assert typed(main, "--check", str(TINY)) == (0, "", "")
    assert typed(main, "--config", str(TINY), "--epo_lambda", "0", "--check") == (0, "", "")
    assert "epo_lambda: expected" in typed(main, "--config", str(TINY), "--epo_lambda", "-1", "--check")[2]
    assert "environment: expected" in typed(main, "--check")[2], "nothing to check is no success"
    code, out, err = typed(main, "--check", str(wrong), str(TINY), str(worse))
    lines = err.splitlines()
    assert (code, out, len(lines)) == (1, "", 2)
    assert lines[0].startswith(f"{wrong}: --epo_lamda: no option") and lines[1].startswith(f"{worse}: n_iid: ")
