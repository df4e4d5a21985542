"""`recipes/make_train.py`: what has ended is not run again, and nothing that differs from it is taken for it."""

import subprocess
from pathlib import Path

import forked
import pytest

RECIPES = Path(__file__).parents[1] / "recipes"
EXAMPLE = RECIPES / "my_env" / "tiny_cpu.yaml"


@pytest.fixture
def make_train(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    import make_train

    return make_train


@pytest.fixture
def started(make_train, monkeypatch, tmp_path):
    """The commands that were run, by a stand-in that writes the end of a run."""
    commands = []

    def stand_in(command, check):
        commands.append(command)
        (tmp_path / make_train.FINISHED).write_text("the end")

    monkeypatch.setattr(make_train.subprocess, "run", stand_in)
    return commands


def test_the_recipe_is_asked_unless_this_very_run_has_ended(make_train, started, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text("max_steps: 1\n")

    def asked(*overrides, seed=0):
        started.clear()
        make_train.run("train.py", config, tmp_path, seed, *overrides)
        return bool(started)

    assert asked() and not asked()
    assert f"{tmp_path} is finished" in capsys.readouterr().err
    assert asked("--max_steps", "2") and not asked("--max_steps", "2")
    assert asked() and asked(seed=1) and not asked(seed=1)
    config.write_text("max_steps: 3\n")
    assert asked(seed=1) and not asked(seed=1)
    (tmp_path / make_train.FINISHED).write_text("another end")  # the recipe was run without make_train
    assert asked(seed=1)
    (tmp_path / make_train.FINISHED).unlink()
    assert asked(seed=1)


def test_a_run_that_failed_is_not_taken_for_ended(make_train, started, tmp_path, monkeypatch):
    make_train.run("train.py", EXAMPLE, tmp_path, 0)

    def fails(command, check):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(make_train.subprocess, "run", fails)
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            make_train.run("train.py", EXAMPLE, tmp_path, 0, "--max_steps", "2")


@pytest.mark.slow
def test_a_finished_folder_is_refused_for_another_run(make_train, tmp_path, monkeypatch):
    said = []

    def in_a_fork(command, check):
        done = forked.run(command[1:], cwd=tmp_path, log=tmp_path / "log.txt")
        said.append(done.stdout)
        done.check_returncode()

    monkeypatch.setattr(make_train.subprocess, "run", in_a_fork)
    sizes = ("--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1", "--report_to", "none")
    sizes += ("--model_name_or_path", "tiny", "--from_scratch")
    make_train.run("train.py", EXAMPLE, tmp_path / "run", 0, *sizes, "--max_steps", "1")
    with pytest.raises(subprocess.CalledProcessError):
        make_train.run("train.py", EXAMPLE, tmp_path / "run", 0, *sizes, "--max_steps", "2")
    assert (
        "is finished; it was made with other settings" in said[1] and "max_steps: 1 in the checkpoint, 2 now" in said[1]
    )
