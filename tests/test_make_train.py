"""`recipes/make_train.py`: what has ended is not run again, and nothing that differs from it is taken for it."""

import importlib
import subprocess
from pathlib import Path

import forked
import pytest

RECIPES = Path(__file__).parents[1] / "recipes"
EXAMPLE = RECIPES / "my_env" / "tiny_cpu.yaml"


@pytest.fixture
def make_train(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("make_train")


@pytest.mark.parametrize("gpu", [True, False])
def test_a_chat_model_has_configs_for_a_gpu_and_for_a_cpu_which_says_its_hours(make_train, monkeypatch, capsys, gpu):
    monkeypatch.setattr(make_train.torch.cuda, "is_available", lambda: gpu)
    configs = make_train.chat_configs(make_train.ENVIRONMENTS["alfworld-real"], "my/model")
    assert configs == (("sft_smollm2_1gpu", "smollm2_1gpu") if gpu else ("sft_smollm2_cpu", "smollm2_cpu"))
    assert all((RECIPES / "alfworld" / f"{name}.yaml").is_file() for name in configs)
    assert ("my/model is trained on the CPU" in capsys.readouterr().err) != gpu


def test_a_chat_model_is_for_the_real_games_and_grpo(make_train, monkeypatch, capsys):
    for words in (["--env", "webshop"], ["--env", "alfworld-real", "--algo", "ppo"]):
        monkeypatch.setattr("sys.argv", ["make_train.py", "--model", "my/model", *words])
        with pytest.raises(SystemExit):
            make_train.main()
        assert "--model: expected --env alfworld-real and --algo grpo_epo or grpo" in capsys.readouterr().err


@pytest.mark.parametrize("environment", ["alfworld", "alfworld-real", "scienceworld", "webshop"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_next_command_names_a_config_that_there_is(make_train, environment, algorithm):
    folder, ending, _ = make_train.ENVIRONMENTS[environment]
    text = make_train.next_commands(Path("runs/x"), f"{folder}/{make_train.ALGORITHMS[algorithm].config}{ending}")
    name = text.split("--config ")[1].split()[0]
    assert (RECIPES / f"{name}.yaml").is_file() and Path(name).name.startswith("eval_")


@pytest.mark.slow
def test_a_finished_folder_is_left_as_it_is_and_refused_for_another_run(make_train, tmp_path, monkeypatch):
    said = []

    def in_a_fork(command, check):
        done = forked.run(command[1:], cwd=tmp_path, log=tmp_path / "log.txt")
        said.append(done.stdout)
        done.check_returncode()

    monkeypatch.setattr(make_train.subprocess, "run", in_a_fork)
    sizes = ("--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1", "--report_to", "none")
    sizes += ("--model_name_or_path", "tiny", "--from_scratch")
    make_train.run("train.py", EXAMPLE, tmp_path / "run", 0, *sizes, "--max_steps", "1")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    make_train.run("train.py", EXAMPLE, tmp_path / "run", 0, *sizes, "--max_steps", "1")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    with pytest.raises(subprocess.CalledProcessError):
        make_train.run("train.py", EXAMPLE, tmp_path / "run", 0, *sizes, "--max_steps", "2")
    assert "max_steps: 1 there, 2 now" in said[2]
