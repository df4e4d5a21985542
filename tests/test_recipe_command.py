"""A recipe as one types it: with nothing, with half of it, with something wrong."""

import ast
import re
import runpy
import sys
import warnings
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch
from trl import ModelConfig, SFTConfig
from typed import parse_recipe

from epo_trl.cli import command_line, program
from epo_trl.cli.base import at_least
from epo_trl.cli.command_line import AlgorithmArguments, CommandLine, overview, recipe_file
from epo_trl.cli.options import RecipeParser, parse_options
from epo_trl.cli.program import run_recipe
from epo_trl.envs.base import EnvError
from epo_trl.errors import InputError
from epo_trl.evaluation import get_protocol
from epo_trl.trainers import EPOConfig, EPOPPOConfig

ROOT = Path(__file__).parents[1]
GRPO = ROOT / "recipes" / "alfworld_grpo_epo.py"
CONFIGS = ["alfworld/tiny*", "alfworld/qwen*"]
TINY = ROOT / "recipes" / "alfworld" / "tiny_cpu.yaml"


@pytest.fixture
def typed(monkeypatch, capsys):
    """Returns a function that runs a `main` as a recipe and returns `(exit code, stdout, stderr)`."""

    def run(main, *arguments):
        monkeypatch.setattr("sys.argv", [str(GRPO), *arguments])
        code = 0
        try:
            run_recipe(main, CONFIGS)
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


def parse(*argv, types=(EPOConfig, ModelConfig, AlgorithmArguments), environment="alfworld"):
    return parse_recipe(*types, environment=environment, argv=argv)


# ------------------------------------------------------------------------------------------------ without arguments


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        (0, "python {recipe} --config {folder}/tiny_cpu.yaml"),
        (1, "{launch}/single_gpu.yaml {recipe} --config {folder}/qwen2.5-1.5b_1gpu.yaml"),
        (8, "{launch}/zero3.yaml {recipe} --config {folder}/qwen2.5-3b_8gpu.yaml"),
    ],
)  # fmt: skip
def test_a_recipe_alone_lists_its_configs_and_the_command_for_this_machine(gpus, says, typed, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    code, out, err = typed(lambda line: pytest.fail("nothing was asked for"))
    lines = out.splitlines()
    assert (code, err) == (0, "") and len(lines) < 10
    launch = "accelerate launch --config_file accelerate_configs"
    assert f"  {says.format(launch=launch, recipe=GRPO, folder=TINY.parent)}" in lines
    assert set(re.findall(r"(\S+\.yaml) +[A-Z]", out)) == set(map(str, TINY.parent.glob("[qt]*")))


def test_other_numbers_of_gpus_say_so_to_the_launcher():
    configs = {name: Path(name) for name in ("a_1gpu.yaml", "a_8gpu.yaml")}
    program = replace(recipe_file(Path("r.py"), []), find_configs=lambda: configs)
    assert "--num_processes 4 r.py --config a_8gpu.yaml" in command_line.command(program, 4)
    assert "--num_processes" not in command_line.command(program, 8)


def test_a_recipe_without_a_config_for_gpus_names_the_one_it_has():
    configs = {"sft_tiny_cpu.yaml": Path("sft_tiny_cpu.yaml")}
    program = replace(recipe_file(Path("sft.py"), []), find_configs=lambda: configs)
    assert command_line.command(program, 8) == "python sft.py --config sft_tiny_cpu.yaml"


def test_every_shipped_config_belongs_to_a_recipe_that_lists_it():
    listed = set()
    for recipe in sorted((ROOT / "recipes").glob("*.py")):
        patterns = re.findall(r"_recipe\([^)]*configs=(\[.*?\])", recipe.read_text(), re.S)
        for pattern in ast.literal_eval(patterns[0]) if patterns else []:
            found = list(recipe.parent.glob(f"{pattern}.yaml"))
            assert found, f"{recipe.name}: {pattern}"
            listed |= set(found)
        assert not patterns or re.search(
            r"_cpu\S*\.yaml {2,}\w", overview(recipe_file(recipe, ast.literal_eval(patterns[0])), 0)
        )
    assert listed == set((ROOT / "recipes").glob("*/*.yaml"))


# ----------------------------------------------------------------------------------------------------------- errors


def wrong_protocol(line):
    get_protocol("no such protocol")


def wrong_environment(line):
    raise EnvError("games: got 'x',\n takes another")


@pytest.mark.parametrize("main", [wrong_protocol, wrong_environment])
def test_an_error_of_ours_is_one_line_without_traceback(main, typed):
    code, out, err = typed(main, "--config", str(TINY))
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert err.startswith("alfworld_grpo_epo.py: error: ") and "Traceback" not in err


def test_what_an_environment_has_said_reaches_no_terminal_as_a_command(typed):
    def broken(line):
        raise EnvError("games: \x1b]0;title\x07 \x1b[31mred\u202e")

    _, _, err = typed(broken, "--config", str(TINY))
    assert r"\x1b]0;title\x07 \x1b[31mred\u202e" in err and "\x1b" not in err


def test_without_a_config_the_error_is_followed_by_the_configs(typed):
    code, _, err = typed(wrong_environment, "--seed", "1")
    assert code == 1 and err.startswith("alfworld_grpo_epo.py: error: environment: expected one of alfworld, ")
    assert "tiny_cpu.yaml" in err
    _, _, err = typed(wrong_environment, "--environment", "alfworld", "--seed", "1")
    assert err == "alfworld_grpo_epo.py: error: games: got 'x', takes another\n"


@pytest.mark.parametrize(
    "bug", [lambda line: {}["x"], lambda line: at_least(1)("x"), lambda line: torch.zeros(2) @ torch.zeros(3)]
)
def test_a_bug_keeps_its_traceback(bug, typed):
    """The second is an error of Python itself inside of our files: nobody wrote it for a user."""
    with pytest.raises((KeyError, ValueError, RuntimeError)):
        typed(bug, "--config", str(TINY))


@pytest.mark.parametrize(
    ("error", "notes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 22.00 MiB."), [program.LESS_MEMORY]),
        (RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"), [program.LESS_MEMORY]),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), []),
    ],
)
def test_a_full_gpu_keeps_its_traceback_which_ends_with_what_to_do(error, notes, typed):
    def full(line):
        raise error

    with pytest.raises(RuntimeError) as caught:
        typed(full, "--config", str(TINY))
    assert getattr(caught.value, "__notes__", []) == notes


@pytest.mark.parametrize("error", ["KeyError('train')", "ValueError('no game')"])
@pytest.mark.parametrize("folder", [ROOT / "recipes" / "my_env", None], ids=["recipes", "elsewhere"])
def test_an_exception_of_a_user_s_environment_keeps_its_traceback(error, folder, typed, tmp_path):
    code = compile(f"def play(line):\n    raise {error}", str((folder or tmp_path) / "their_env.py"), "exec")
    names = {}
    exec(code, names)
    with pytest.raises((KeyError, ValueError)):
        typed(names["play"], "--config", str(TINY))


def test_traceback_shows_that_of_our_errors(typed):
    with pytest.raises(EnvError):
        typed(wrong_environment, "--config", str(TINY), "--traceback")


@pytest.mark.parametrize(("rank", "waits"), [("0", []), ("1", [60.0])])
def test_ranks_with_the_same_error_leave_it_to_the_first(rank, waits, typed, monkeypatch):
    """The launcher ends the others while they wait; one that is alone with its error still says it."""
    slept = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(program.time, "sleep", slept.append)
    assert "takes another" in typed(wrong_environment, "--config", str(TINY))[2]
    assert slept == waits


# ---------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--epo_lamb", "0"], r"--epo_lamb: unknown.*did you mean --epo_lambda\?"),
        (["--epo_lambda", "-1"], "epo_lambda: expected a number >= 0, got -1.0"),
        (["--num_generations", "3"], "generation_batch_size"),
        (["--method_kwargs", "{ea: }"], "method_kwargs: expected 'name: value' pairs.*got '{ea: }'"),
        (["--generation_kwargs", "x"], "generation_kwargs: expected 'name: value' pairs.*got 'x'"),
        (["--model_init_kwargs", ' ["a"]'], "model_init_kwargs: expected 'name: value' pairs.*got"),
        (["--use_cpu", "true", "--accelerator_config", "no.json"], "No such file or directory: 'no.json'"),
        (["--config"], "--config: expected a YAML file.*got nothing"),
        (["--config", "a", "--config=b"], "--config: expected a YAML file, .*got more than one"),
    ],
)
def test_a_wrong_command_line_is_an_error_that_names_it(argv, says):
    with pytest.raises(InputError, match=says):
        parse("--games", "generated", *argv)


def test_pairs_are_read_with_spaces_around_them_and_from_a_yaml_file(tmp_path):
    for written in (' {"num_cycles": 2}', '\n{"num_cycles": 2} '):
        config = parse("--games", "generated", "--use_cpu", "true", "--lr_scheduler_kwargs", written)[1]
        assert config.lr_scheduler_kwargs == {"num_cycles": 2}
    assert parse("--games", "generated", "--use_cpu", "true", "--lr_scheduler_kwargs", "")[1].lr_scheduler_kwargs == {}
    (tmp_path / "rl.yaml").write_text("lr_scheduler_kwargs: x\n")
    with pytest.raises(InputError, match="lr_scheduler_kwargs: expected 'name: value' pairs.*got 'x'"):
        parse("--games", "generated", "--config", str(tmp_path / "rl.yaml"))


def test_a_word_in_braces_is_a_word_where_no_pairs_are_expected():
    assert parse("--games", "generated", "--run_name", "{seed}")[1].run_name == "{seed}"


def test_the_config_may_follow_an_equals_sign():
    assert parse(f"--config={TINY}", "--max_turns=7")[1].max_turns == 7


@pytest.mark.parametrize(
    ("path", "kind", "names"),
    [
        ("alfworld/qwen2.5-3b_8gpu.yaml", EPOConfig, "alfworld/tiny_cpu.yaml"),
        ("alfworld/ppo_qwen2.5-1.5b_1gpu.yaml", EPOPPOConfig, "alfworld/ppo_tiny_cpu.yaml"),
    ],
)
def test_a_config_for_gpus_on_a_machine_without_one_names_that_for_the_cpu(path, kind, names, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(InputError, match=f"bf16: expected false on .*, got true; use --config .*{names}"):
        parse("--config", str(ROOT / "recipes" / path), types=(kind, ModelConfig, AlgorithmArguments))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="bf16 stays on there")
@pytest.mark.parametrize("kind", [EPOConfig, SFTConfig])
def test_a_config_that_says_nothing_about_precision_runs_on_this_machine_and_warns_of_nothing(kind, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, args, *_ = parse("--games", "generated", "--output_dir", str(tmp_path), types=(kind, ModelConfig))
    assert args.bf16 is False
    assert args.activation_checkpointing is args.gradient_checkpointing is True  # TRL's default, by both its names


# ------------------------------------------------------------------------------------------------------------- help


def test_the_whole_help_begins_with_our_options_and_groups_the_others(capsys):
    with pytest.raises(SystemExit) as exit:
        parse("--help-all", types=(EPOPPOConfig, ModelConfig))
    text = capsys.readouterr().out
    assert exit.value.code == 0 and "--config FILE" in text.splitlines()[0]
    headings = [line.split(":")[0] for line in text.splitlines() if re.match(r"\w.*:$", line)]
    ours = ["EnvironmentArguments", "AlfworldArguments", "EPOPPOConfig", "EPOConfig"]
    assert headings[:5] == ["general", *ours]
    theirs = headings.index("trl")  # before it there may be more of ours
    assert set(headings[theirs:-1]) == {"trl"} and headings[-1] == "transformers"
    assert text.index("--gae_lambda") < text.index("--epo_lambda") < text.index("--beta ") < text.index("--output_dir")
    assert "--epo-lambda" not in text and text.count("--bf16 ") == 1


def test_the_help_fits_on_two_screens_and_has_each_option_of_ours_once(capsys):
    with pytest.raises(SystemExit) as exit:
        parse("--help", "--games", "generated", types=(AlgorithmArguments, EPOPPOConfig, ModelConfig))
    lines = capsys.readouterr().out.splitlines()
    assert exit.value.code == 0 and len(lines) <= 100 and max(map(len, lines)) <= 120
    listed = [line.split()[0] for line in lines if line.startswith("  --")]
    ours = {field.name for kind in EPOPPOConfig.__mro__ if kind.__module__.startswith("epo_trl") and is_dataclass(kind)
            for field in fields(kind) if field.name in vars(kind).get("__annotations__", {})}  # fmt: skip
    assert len(listed) == len(set(listed)) and {f"--{name}" for name in ours} <= set(listed)
    assert "--games" in listed and "--max_steps" not in listed and "--help-all" in lines[-1]


def test_the_help_shows_bounds_once_however_often_it_is_formatted():
    parser = RecipeParser(CommandLine([], None, {}, "trap", "grpo"), [EPOConfig])
    assert "(>= 1) Number of rooms." in parser.format_help()
    assert parser.format_help() == parser.format_help() and "(>= 1) (>= 1)" not in parser.format_help_all()


@pytest.mark.parametrize(("world", "option"), [("alfworld", "--games"), ("scienceworld", "--jvms")])
@pytest.mark.parametrize(("algorithm", "critic"), [("grpo", False), ("ppo", True)])
def test_a_named_recipe_has_the_options_of_its_environment_and_algorithm(
    world, option, algorithm, critic, monkeypatch, capsys
):
    recipe = ROOT / "recipes" / f"{world}_{algorithm}_epo.py"
    monkeypatch.setattr("sys.argv", [str(recipe), "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(recipe), run_name="__main__")
    text = capsys.readouterr().out
    assert f"\n  {option} " in text and ("--critic " in text) is critic
    assert re.search(rf"--environment +\[{world}\]", text)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("scienceworld/tiny_cpu", "environment: expected 'alfworld', which this recipe trains, got 'scienceworld'"),
        ("alfworld/ppo_tiny_cpu", "algorithm: expected 'grpo', which this recipe trains, got 'ppo'"),
    ],
)
def test_a_recipe_refuses_a_config_for_another_environment_or_algorithm(config, says, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [str(GRPO), "--config", str(ROOT / "recipes" / f"{config}.yaml")])
    with pytest.raises(SystemExit, match="^1$"):
        runpy.run_path(str(GRPO), run_name="__main__")
    assert f"error: {says}; recipes/train.py trains any config\n" in capsys.readouterr().err


def test_the_help_of_a_general_recipe_shows_the_environment_that_is_named(capsys):
    for argv, shown in ((["--help"], False), (["--help", "--environment", "alfworld"], True)):
        with pytest.raises(SystemExit):
            parse_recipe(SFTConfig, argv=argv)
        text = capsys.readouterr().out
        assert "--environment" in text and ("--room_types" in text) is shown


def test_the_help_of_a_command_says_how_to_start_several_processes(command):
    code, text, _ = command("train", "--help")
    assert code == 0 and text.startswith("usage: epo-trl train --config FILE")
    assert text.index("--epo_lambda") < text.index("--accelerate_config FILE") < text.index("--num_processes")
    assert "zero3" in text and "\n  --check FILE [FILE ...]\n" in text and text.endswith("  --traceback\n")


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
    assert lines[0].startswith(f"{wrong}: epo_lamda: unknown") and lines[1].startswith(f"{worse}: n_iid: ")


GAME = """
from dataclasses import dataclass
from epo_trl.envs.toy import ToySuite

@dataclass
class Game:
    {setting}: int = 1

    def make_suite(self):
        return ToySuite()
"""


def test_each_config_is_checked_against_the_module_in_its_own_folder(typed, tmp_path):
    def main(line):
        parse_options(line, EPOConfig, ModelConfig, AlgorithmArguments)

    configs = []
    for folder, setting, written in (("a", "rooms", "rooms"), ("b", "doors", "doors"), ("c", "doors", "rooms")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "game_of_a_folder.py").write_text(GAME.format(setting=setting))
        configs.append(tmp_path / folder / "rl.yaml")
        configs[-1].write_text(f"environment: game_of_a_folder:Game\n{written}: 2\nuse_cpu: true\nbf16: false\n")
    path = list(sys.path)
    code, _, err = typed(main, "--check", *map(str, configs))
    assert code == 1 and err.startswith(f"{configs[2]}: rooms: unknown in ") and err.count("\n") == 1
    assert sys.path == path and "game_of_a_folder" not in sys.modules
