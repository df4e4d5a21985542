"""Python and the packages: which versions are here, which are taken, and whether they can be imported."""

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
OPTIONAL = ("deepspeed", "vllm")  # packages, and extras of TRL, which says the versions


def requirements(extra: str = "", of: str = OWN) -> list[Requirement]:
    """Returns what a package requires, or what one of its extras adds; nothing if it is not installed itself."""
    try:
        said = [Requirement(text) for text in requires(of) or ()]
    except PackageNotFoundError:
        return []
    if not extra:
        return [need for need in said if need.marker is None]
    return [need for need in said if need.marker is not None and need.marker.evaluate({"extra": extra})]


def core_requirements() -> list[Requirement]:
    """Returns what every run needs, in the versions that TRL takes too."""
    of_trl = {need.name: need.specifier for need in requirements(of=TRL)}
    needs = requirements()
    for need in needs:
        need.specifier &= of_trl.get(need.name, SpecifierSet())
    return needs


def optional_requirements() -> list[Requirement]:
    """Returns the packages that some runs need, in the versions that TRL takes."""
    found = {need.name: need for name in OPTIONAL for need in requirements(name, of=TRL)}
    return [found.get(name, Requirement(name)) for name in OPTIONAL]


def package_findings(imported: Mapping[str, Imported], needs: Sequence[Requirement]) -> list[Finding]:
    """Returns what every run needs: Python, the packages, and our trainers on top of them.

    Args:
        imported: Import results of the packages and of `epo_trl`.
        needs: Requirements of this package.
    """
    findings = [python_finding()]
    if not needs:
        says = "not installed as a package, so the versions that it takes are not known"
        findings.append(Finding(EVERY_RUN, OWN, State.MISSING, says, pip_install(OWN)))
    findings += [package_finding(EVERY_RUN, need, imported[need.name], needed=True) for need in needs]
    if all(finding.state is State.OK for finding in findings if finding.needed):
        findings.append(trainers_finding(imported["epo_trl"]))
    return findings


def python_finding() -> Finding:
    """Returns whether this Python is one that the package takes."""
    here = platform.python_version()
    try:
        takes = metadata(OWN)["Requires-Python"] or ""
    except PackageNotFoundError:
        takes = ""
    if SpecifierSet(takes).contains(here, prereleases=True):
        return Finding(EVERY_RUN, "Python", State.OK, here, needed=True)
    mend = "python3.12 -m venv .venv && .venv/bin/pip install epo-trl"
    return Finding(EVERY_RUN, "Python", State.BROKEN, f"{here}, takes {takes}", mend, needed=True)


def package_finding(part: str, need: Requirement, found: Imported, *, needed: bool = False) -> Finding:
    """Returns how a package is.

    Args:
        part: Heading.
        need: Its name and the versions that are taken.
        found: Result of the import.
        needed: Whether no run works without it.
    """
    plain = Requirement(f"{need.name}{need.specifier}")
    has = version_of(need.name) or found.version
    if not has and found.error.startswith("ModuleNotFoundError"):
        return Finding(part, need.name, State.MISSING, "not installed", pip_install(str(plain)), needed)
    if has and not need.specifier.contains(has, prereleases=True):
        says = f"{has}, takes {need.specifier}"
        return Finding(part, need.name, State.BROKEN, says, pip_install(str(plain)), needed)
    if found.error:
        says = f"{has}, cannot be imported: {found.error}".lstrip(", ")
        return Finding(part, need.name, State.BROKEN, says, pip_install(str(plain), "--force-reinstall"), needed)
    return Finding(part, need.name, State.OK, has or "of unknown version", needed=needed)


def version_of(name: str) -> str:
    """Returns the version of an installed distribution, `""` if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def trainers_finding(found: Imported) -> Finding:
    """Returns whether our own trainers can be imported where all that they need can."""
    if not found.error:
        return Finding(EVERY_RUN, "epo_trl", State.OK, f"{found.version}, its trainers load", needed=True)
    says = f"its trainers cannot be imported: {found.error}"
    return Finding(EVERY_RUN, "epo_trl", State.BROKEN, says, pip_install(OWN, "--force-reinstall"), needed=True)


def option_findings(imported: Mapping[str, Imported]) -> list[Finding]:
    """Returns how the packages are that only some runs need."""
    return [package_finding(OPTIONS, need, imported[need.name]) for need in optional_requirements()]
