"""Checks a machine: what works, what is missing, and the command that fixes it. Trains and downloads nothing."""

from __future__ import annotations

import os

from epo_trl.lab.doctor.finding import Finding, State, as_json, as_text
from epo_trl.lab.doctor.games import alfworld_findings, scienceworld_findings, webshop_findings
from epo_trl.lab.doctor.machine import disk_findings, gpu_finding, hub_finding
from epo_trl.lab.doctor.packages import option_findings, package_findings

__all__ = ["Finding", "State", "as_json", "as_text", "examine"]


def examine(*, online: bool = False) -> list[Finding]:
    """Runs all checks and returns their findings, grouped by part. Imports all libraries, which is slow.

    Contacts the Hub if `online`; otherwise nothing leaves the machine.
    """
    return [
        *package_findings(),
        *option_findings(),
        gpu_finding(),
        *disk_findings(),
        *([hub_finding()] if online else []),
        *alfworld_findings(os.environ.get("ALFWORLD_DATA", "")),
        *scienceworld_findings(),
        *webshop_findings(os.environ.get("WEBSHOP_DATA", "")),
    ]
