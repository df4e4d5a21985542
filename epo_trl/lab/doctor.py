"""`epo-trl doctor`: lists what works on this machine, what is missing, and the command that fixes it."""

from __future__ import annotations

import faulthandler
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from epo_trl.cli.base import make_parser, say
from epo_trl.envs.alfworld.alfworld_suite import data_folder
from epo_trl.envs.base import EnvError
from epo_trl.envs.scienceworld.jvm import find_java
from epo_trl.envs.webshop import release
from epo_trl.errors import one_line

EXTRAS = ("deepspeed", "vllm", "qlora", "alfworld", "scienceworld", "webshop")
MODULES = {"pyyaml": "yaml", "fast_downward_textworld": "fast_downward"}  # where the package has another name
NOT_IMPORTED = {"alfworld"}  # importing it creates a folder for games


def main(argv: Sequence[str]) -> int:
    """Prints the list; returns 1 if something that every run needs is missing or broken, else 0."""
    make_parser(
        "doctor",
        "Lists what works on this machine, what is missing, and the command that fixes it. Exits with 1 only if "
        "something that every run needs is missing or broken. Nothing leaves the machine.",
    ).parse_args(argv)
    faulthandler.enable(2)  # names the import that ends the process
    fatal = [need.name for need in requirements() if not check_package(need)]
    fatal += [] if check("epo_trl", import_trainers, pip_install("--force-reinstall epo-trl")) else ["epo_trl"]
    check("GPU", describe_gpus, "nvidia-smi")
    for extra in EXTRAS:
        for need in requirements(extra):
            check_package(need)
    check("Java", find_java)
    check("ALFWORLD_DATA", lambda: str(data_folder()))
    check("WEBSHOP_DATA", lambda: str(release.data_folder()))
    say(f"\nNo run can start until these are fixed: {', '.join(fatal)}." if fatal else "\nEvery run can start.")
    return int(bool(fatal))


def check(name: str, probe: Callable[[], str], fix: str = "") -> bool:
    """Prints what a probe returns, or its error and the command that fixes it; returns whether it works."""
    state = "ok"
    try:
        with redirect_stdout(sys.stderr):
            message = probe()
    except EnvError as error:  # not set up; the message says how
        state, message, fix = "missing", str(error), ""
    except PackageNotFoundError:
        state, message = "missing", "not installed"
    except (Exception, SystemExit) as error:
        state, message = "broken", f"{type(error).__name__}: {error}"
    say(f"{state:8} {name:24} {one_line(message)}")
    if state != "ok" and fix:
        say(f"{'':8} fix: {fix}")
    return state == "ok"


def requirements(extra: str = "") -> list[Requirement]:
    """Returns the requirements of every run, or those that an extra of this package adds."""
    found = [Requirement(text) for text in requires("epo-trl") or ()]
    return [need for need in found if (need.marker.evaluate({"extra": extra}) if need.marker else not extra)]


def check_package(need: Requirement) -> bool:
    """Checks the version of a package, and whether it can be imported."""

    def probe() -> str:
        has = version(need.name)
        if not need.specifier.contains(has, prereleases=True):
            raise RuntimeError(f"expected {need.specifier}, got {has}")
        if need.name not in NOT_IMPORTED:
            import_module(MODULES.get(need.name, need.name))
        return has

    return check(need.name, probe, pip_install(f"'{need.name}{need.specifier}'"))


def import_trainers() -> str:
    """Imports the trainers, and with them what TRL and transformers import on first use."""
    package = import_module("epo_trl")
    return f"{package.__version__}, {package.EPOTrainer.__name__} and {package.EPOPPOTrainer.__name__} can be imported"


def describe_gpus() -> str:
    """Names the GPUs that torch can use."""
    torch = import_module("torch")
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16, so set bf16: false"
        return "; ".join([*(f"{device.name}, {device.total_memory / 1e9:.0f} GB" for device in devices), bf16])
    if shutil.which("nvidia-smi"):
        raise RuntimeError(f"torch {torch.__version__} cannot use the NVIDIA GPU of this machine")
    raise EnvError("none: the configs named tiny_cpu run here, the others need one")


def pip_install(what: str) -> str:
    """Returns the command that installs something for this Python; PATH may have the `pip` of another."""
    return f"{sys.executable} -m pip install {what}"
