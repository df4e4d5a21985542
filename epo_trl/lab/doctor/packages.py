"""Checks the packages: installed version, supported versions, and whether the import works."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from epo_trl.lab.doctor.finding import Finding, State, pip_install

OWN, TRL = "epo-trl", "trl"
EVERY_RUN, OPTIONS = "every run", "options"
OPTIONAL = ("deepspeed", "vllm")  # packages, and extras of TRL, which set the versions
# Names and submodules that a run uses, from packages that import them lazily.
LAZY = {
    "trl": ("GRPOTrainer", "SFTTrainer"),
    "transformers": ("AutoModelForCausalLM", "Trainer"),
    "epo_trl": ("EPOTrainer", "EPOPPOTrainer"),
}
MODULES = {"pyyaml": "yaml"}  # where the package has another name
SUBMODULES = {"textworld": "textworld.envs.pddl.textgen", "scienceworld": "scienceworld.constants"}


def requirements(extra: str = "", of: str = OWN) -> list[Requirement]:
    """Returns the requirements of a package, or those that one of its extras adds; none if it is not installed."""
    try:
        found = [Requirement(text) for text in requires(of) or ()]
    except PackageNotFoundError:
        return []
    if not extra:
        return [need for need in found if need.marker is None]
    return [need for need in found if need.marker is not None and need.marker.evaluate({"extra": extra})]


def core_requirements() -> list[Requirement]:
    """Returns the requirements of every run, in versions that this package and TRL support."""
    of_trl = {need.name: need.specifier for need in requirements(of=TRL)}
    needs = requirements()
    for need in needs:
        need.specifier &= of_trl.get(need.name, SpecifierSet())
    return needs


def import_error(name: str) -> str:
    """Imports a module; returns the exception as text, `""` if the import works."""
    try:
        with redirect_stdout(sys.stderr):
            module = import_module(name)
            for attribute in LAZY.get(name, ()):
                getattr(module, attribute)
            import_module(SUBMODULES.get(name, name))
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def package_findings() -> list[Finding]:
    """Checks the requirements of every run: the packages, and the trainers of this package."""
    needs = core_requirements()
    if not needs:
        message = "not installed as a package, so the supported versions are unknown"
        return [Finding(EVERY_RUN, OWN, State.MISSING, message, pip_install(OWN))]
    findings = [package_finding(EVERY_RUN, need, needed=True) for need in needs]
    is_ok = all(finding.state is State.OK for finding in findings)
    return [*findings, trainers_finding()] if is_ok else findings


def option_findings() -> list[Finding]:
    """Checks the packages that only some runs need, in the versions that TRL supports."""
    found = {need.name: need for name in OPTIONAL for need in requirements(name, of=TRL)}
    return [package_finding(OPTIONS, found.get(name, Requirement(name))) for name in OPTIONAL]


def package_finding(part: str, need: Requirement, *, needed: bool = False) -> Finding:
    """Checks the version of a package, and whether it can be imported."""
    found, plain = partial(Finding, part, need.name, needed=needed), f"{need.name}{need.specifier}"
    try:
        has = version(need.name)
    except PackageNotFoundError:
        return found(State.MISSING, "not installed", pip_install(plain))
    if not need.specifier.contains(has, prereleases=True):
        return found(State.BROKEN, f"expected {need.specifier}, got {has}", pip_install(plain))
    if error := import_error(MODULES.get(need.name, need.name)):
        return found(State.BROKEN, f"{has}, cannot be imported: {error}", pip_install(plain, "--force-reinstall"))
    return found(State.OK, has)


def trainers_finding() -> Finding:
    """Checks whether the trainers of this package can be imported."""
    found = partial(Finding, EVERY_RUN, "epo_trl", needed=True)
    if error := import_error("epo_trl"):
        return found(State.BROKEN, f"trainers cannot be imported: {error}", pip_install(OWN, "--force-reinstall"))
    return found(State.OK, f"{import_module('epo_trl').__version__}, trainers can be imported")
