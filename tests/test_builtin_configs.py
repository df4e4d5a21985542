"""`epo-trl train`, `sft` and `evaluate`: the configs of `recipes/` by name, from a checkout and from a wheel."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import accelerate.commands.launch as accelerate_launch
import pytest
import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from epo_trl.cli import main, program
from epo_trl.cli.options import builtin_configs, config_name, list_configs, read_command_line

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
TYPICAL = ["alfworld/tiny_cpu", "alfworld/ppo_tiny_cpu", "trap/tiny_cpu", "my_env/tiny_cpu"]
OWN = {"my_env": "my_env:GuessArguments", "textworld_express": "twx_env:TwxArguments"}
TRAP = RECIPES / "trap" / "tiny_cpu.yaml"


def test_every_config_of_the_repository_has_a_name_and_one_command():
    files = {path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.glob("*/*.yaml")}
    by_command = [set(list_configs(command)) for command in ("train", "sft", "evaluate")]
    assert set(builtin_configs()) == files == set.union(*by_command)
    assert sum(map(len, by_command)) == len(files) > 20


def test_every_rl_config_names_its_environment_and_algorithm():
    """So a copy of it means the same in any folder and under any name."""
    for name, path in list_configs("train").items():
        folder, _, stem = name.partition("/")
        config = yaml.safe_load(path.read_text())
        assert config["algorithm"] == ("ppo" if stem.startswith("ppo_") else "grpo"), name
        assert config["environment"] == OWN.get(folder, folder), name
    for command in ("sft", "evaluate"):
        assert all("environment" in yaml.safe_load(path.read_text()) for path in list_configs(command).values())


@pytest.mark.parametrize("name", ["alfworld/ppo_tiny_cpu", "alfworld/ppo_tiny_cpu.yaml"])
def test_a_name_becomes_a_file_unless_there_is_one_of_that_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = read_command_line(["--seed", "1", "--config", name])
    file = builtin_configs()["alfworld/ppo_tiny_cpu"]
    assert (line.config, line.values, line.algorithm) == (file, yaml.safe_load(file.read_text()), "ppo")
    assert config_name(file) == "alfworld/ppo_tiny_cpu" and config_name(TRAP) == str(TRAP)
    (tmp_path / "alfworld").mkdir()
    Path(name).write_text("environment: trap\n")
    assert read_command_line([f"--config={name}"]).environment == "trap"


@pytest.mark.parametrize(
    ("name", "configs", "wrong"),
    [
        ("train", TYPICAL, ""),
        ("sft", ["trap/sft_tiny_cpu", "alfword/tiny_cpu"], "alfword/tiny_cpu: --config: .* mean alfworld/tiny_cpu?"),
        ("evaluate", ["alfworld/eval_tiny_cpu", "trap/tiny_cpu"], "trap/tiny_cpu: --[a-z_]+: no option of "),
    ],
)
def test_the_recipes_take_their_configs_by_name(name, configs, wrong, command):
    code, _, err = command(name, "--check", *configs)
    assert code == bool(wrong) and re.match(wrong, err) and err.count("\n") == bool(wrong)


@pytest.fixture
def handlers(monkeypatch):
    """Returns the signal handlers that the command would set."""
    calls = []
    monkeypatch.setenv(program.TORCHRUN_SIGNALS, "")  # set, so that it is set back
    monkeypatch.setattr(program.signal, "signal", lambda *call: calls.append(call))
    return calls


@pytest.mark.parametrize(
    ("words", "launch"),
    [
        (["--accelerate_config", "zero3"], ["--config_file", str(program.ACCELERATE_CONFIGS / "zero3.yaml")]),
        (["--accelerate-config=zero3"], ["--config_file", str(program.ACCELERATE_CONFIGS / "zero3.yaml")]),
        (["--num_processes", "2"], ["--num_processes", "2"]),
        (
            ["--machine-rank", "1", "--main_process_ip=node0", "--accelerate_config", "zero3_2nodes"],
            ["--config_file", str(program.ACCELERATE_CONFIGS / "zero3_2nodes.yaml")]
            + ["--machine_rank", "1", "--main_process_ip", "node0"],
        ),
    ],
)
def test_several_processes_are_started_by_accelerate(words, launch, monkeypatch, handlers):
    started = []
    monkeypatch.setattr(accelerate_launch, "launch_command", started.append)
    rest = ["train", "--config", "trap/tiny_cpu", "--model_name_or_path", "tiny", "--from_scratch"]
    assert main([*rest[:3], *words, *rest[3:]]) == 0
    typed = ["--quiet", *launch, "-m", "epo_trl.cli", *rest]
    assert started == [accelerate_launch.launch_command_parser().parse_args(typed)]
    (args,) = started
    assert args.module and (args.training_script, args.training_script_args) == ("epo_trl.cli", rest)


@pytest.mark.parametrize(("code", "returned"), [(1, 1), (143, 143), (-9, 1)])
def test_the_exit_code_of_several_processes_is_that_of_the_first_failure(
    code, returned, monkeypatch, command, handlers
):
    def fail(args):
        failures = {rank: ProcessFailure(rank, 100 + rank, -15 if rank else code, "") for rank in (0, 1)}
        failures[1].timestamp = failures[0].timestamp + 1
        raise ChildFailedError("epo_trl.cli", failures)

    monkeypatch.setattr(accelerate_launch, "launch_command", fail)
    assert command("train", "--num_processes", "2", "--config", "trap/tiny_cpu") == (returned, "", "")


def test_with_one_process_the_command_becomes_the_run(monkeypatch, handlers):
    """A launcher between them would keep the signals, and change the exit code."""
    became = []

    def become(*call):
        became.append(call)
        raise SystemExit(143)

    monkeypatch.setattr(accelerate_launch, "simple_launcher", None)  # set, so that it is set back
    monkeypatch.setattr(program.os, "execvpe", become)
    with pytest.raises(SystemExit, match="143"):
        main(["train", "--accelerate_config", "single_gpu", "--config", "trap/tiny_cpu"])
    ((file, words, environment),) = became
    assert words == [file, "-m", "epo_trl.cli", "train", "--config", "trap/tiny_cpu"] and file == sys.executable
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert handlers[-1] == (signal.SIGINT, signal.SIG_DFL)


def test_several_processes_that_accelerate_would_not_start_are_an_error(monkeypatch, handlers, command):
    monkeypatch.setattr(accelerate_launch, "simple_launcher", None)  # set, so that it is set back
    monkeypatch.setattr(program.os, "execvpe", lambda *call: pytest.fail("a run of one process was started"))
    for words in (["--num_processes", "4"], ["--num_machines", "4"]):
        code, _, err = command("train", "--accelerate_config", "cpu", *words, "--config", "trap/tiny_cpu")
        assert code == 1 and "--num_processes, --num_machines: expected 1, got 4: " in err


def data_files(folder):
    """Returns the files of the package that are no code; a checkout has links in place of the folders of configs."""
    linked = ("recipes", "studies", "accelerate_configs", "__pycache__")
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".py")
    return {path.as_posix() for path in files if not set(linked) & set(path.parts)}


@pytest.mark.slow
def test_a_wheel_has_configs_and_data_and_its_commands_find_them(tmp_path):
    """Built from a copy, installed without anything else into a folder, called from another."""
    for name in ("epo_trl", "recipes", "studies", "accelerate_configs"):
        hide = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / "source" / name, symlinks=True, ignore=hide)
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path), str(tmp_path / "source")]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    install = ["install", "--no-deps", "--no-compile", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([*pip, *install], check=True)

    done = subprocess.run(
        [sys.executable, str(site / "bin" / "epo-trl"), "train", "--check", *TYPICAL],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    for folder, pattern in (("recipes", "*.yaml"), ("recipes", "*.py"), ("studies", "*"), ("accelerate_configs", "*")):
        there, here = site / "epo_trl" / folder, ROOT / folder
        assert {p.relative_to(there) for p in there.rglob(pattern) if "__pycache__" not in p.parts} == {
            p.relative_to(here) for p in here.rglob(pattern) if "__pycache__" not in p.parts
        }
    assert data_files(site / "epo_trl") == data_files(ROOT / "epo_trl")

    script = (
        "from pathlib import Path; from epo_trl.lab.study.config import load_study, plan\n"
        "study = load_study('smoke'); runs = plan(study, Path('runs'))\n"
        "print(study.path.is_relative_to(Path('site').resolve()), runs[0].identity['recipe'], runs[0].recipe.is_file())"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("True recipes/train.py True\n", "")
