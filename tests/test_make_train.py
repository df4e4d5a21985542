"""`recipes/make_train.py`: what has ended is not run again, and nothing that differs from it is taken for it."""

import importlib
import subprocess
from pathlib import Path

import forked
import pytest

RECIPES = Path(__file__).parents[1] / "recipes"
EXAMPLE = RECIPES / "my_env" / "tiny_cpu.yaml"


@pytest.mark.slow
def test_a_finished_folder_is_left_as_it_is_and_refused_for_another_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    make_train, said = importlib.import_module("make_train"), []

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
    assert "max_steps: 1 in the checkpoint, 2 now" in said[2]
