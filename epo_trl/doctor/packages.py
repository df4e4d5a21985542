"""Checks Python and the packages: installed version, supported versions, and whether the import works."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from epo_trl.doctor.finding import Finding, State, pip_install
from epo_trl.doctor.imports import Imported

OWN, TRL = "epo-trl", "trl"
EVERY_RUN, OPTIONS = "every run", "options"
OPTIONAL = ("deepspeed", "vllm")  # packages, and extras of TRL, which set the versions


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


def optional_requirements() -> list[Requirement]:
    """Returns the packages that only some runs need, in the versions that TRL supports."""
    found = {need.name: need for name in OPTIONAL for need in requirements(name, of=TRL)}
    return [found.get(name, Requirement(name)) for name in OPTIONAL]


def package_findings(imported: Mapping[str, Imported], needs: Sequence[Requirement]) -> list[Finding]:
    """Checks the requirements of every run: Python, the packages, and the trainers of this package.

    Args:
        imported: Import results of the packages and of `epo_trl`.
        needs: Requirements of this package.
    """
    findings = [python_finding()]
    if not needs:
        message = "not installed as a package, so the supported versions are unknown"
        findings.append(Finding(EVERY_RUN, OWN, State.MISSING, message, pip_install(OWN)))
    findings += [package_finding(EVERY_RUN, need, imported[need.name], needed=True) for need in needs]
    if all(finding.state is State.OK for finding in findings if finding.needed):
        findings.append(trainers_finding(imported["epo_trl"]))
    return findings


def python_finding() -> Finding:
    """Checks whether the package supports this version of Python."""
    here = platform.python_version()
    try:
        supported = metadata(OWN)["Requires-Python"] or ""
    except PackageNotFoundError:
        supported = ""
    if SpecifierSet(supported).contains(here, prereleases=True):
        return Finding(EVERY_RUN, "Python", State.OK, here, needed=True)
    fix = "python3.12 -m venv .venv && .venv/bin/pip install epo-trl"
    return Finding(EVERY_RUN, "Python", State.BROKEN, f"expected {supported}, got {here}", fix, needed=True)


def package_finding(part: str, need: Requirement, found: Imported, *, needed: bool = False) -> Finding:
    """Checks the version of a package, and whether it can be imported.

    Args:
        part: Heading.
        need: Name and supported versions.
        found: Result of the import.
        needed: Whether every run needs it.
    """
    plain = Requirement(f"{need.name}{need.specifier}")
    has = version_of(need.name) or found.version
    if not has and found.error.startswith("ModuleNotFoundError"):
        return Finding(part, need.name, State.MISSING, "not installed", pip_install(str(plain)), needed)
    if has and not need.specifier.contains(has, prereleases=True):
        message = f"expected {need.specifier}, got {has}"
        return Finding(part, need.name, State.BROKEN, message, pip_install(str(plain)), needed)
    if found.error:
        message = f"{has}, cannot be imported: {found.error}".lstrip(", ")
        return Finding(part, need.name, State.BROKEN, message, pip_install(str(plain), "--force-reinstall"), needed)
    return Finding(part, need.name, State.OK, has or "unknown version", needed=needed)


def version_of(name: str) -> str:
    """Returns the version of a distribution, `""` if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def trainers_finding(found: Imported) -> Finding:
    """Checks whether the trainers of this package can be imported."""
    if not found.error:
        return Finding(EVERY_RUN, "epo_trl", State.OK, f"{found.version}, trainers can be imported", needed=True)
    message = f"trainers cannot be imported: {found.error}"
    return Finding(EVERY_RUN, "epo_trl", State.BROKEN, message, pip_install(OWN, "--force-reinstall"), needed=True)


def option_findings(imported: Mapping[str, Imported]) -> list[Finding]:
    """Checks the packages that only some runs need."""
    return [package_finding(OPTIONS, need, imported[need.name]) for need in optional_requirements()]
