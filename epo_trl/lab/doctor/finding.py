"""The result of one check of the doctor, and the report of all of them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from shlex import join

from epo_trl.errors import one_line


class State(StrEnum):
    """Result of a check."""

    OK = "ok"
    MISSING = "missing"  # absent, and only some runs need it
    BROKEN = "broken"  # present, but does not work


COLOURS = {State.OK: 32, State.MISSING: 33, State.BROKEN: 31}  # ANSI


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Args:
        part: Heading under which the finding is listed.
        name: Name of the checked item.
        state: Result of the check.
        message: Description of the result.
        fix: Command that fixes the problem, or `""`.
        needed: Whether no run works without it.
    """

    part: str
    name: str
    state: State
    message: str
    fix: str = ""
    needed: bool = False

    @property
    def is_fatal(self) -> bool:
        """Whether the result prevents every run."""
        return self.needed and self.state is not State.OK


def pip_install(requirement: str, *options: str) -> str:
    """Returns the command that installs a requirement for this Python, also if PATH has the `pip` of another."""
    pip = shutil.which("pip")
    here = pip is not None and Path(pip).parent == Path(sys.executable).parent
    words: Sequence[str] = ["pip"] if here else [sys.executable, "-m", "pip"]
    return join([*words, "install", *options, requirement])


def as_json(findings: Sequence[Finding]) -> str:
    """Returns `{"ok": ..., "findings": [...]}`. Each finding has the fields of `Finding`."""
    ok = not any(finding.is_fatal for finding in findings)
    return json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]}, indent=2)


def as_text(findings: Sequence[Finding], *, colour: bool = False) -> str:
    """Returns one line for each finding, followed by a line with the command that fixes it, if any."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for part, group in groupby(findings, lambda finding: finding.part):
        lines.append(part)
        for finding in group:
            state = f"\x1b[{COLOURS[finding.state]}m{finding.state:7}\x1b[0m" if colour else f"{finding.state:7}"
            lines.append(f"  {state}  {finding.name:{width}}  {one_line(finding.message)}")
            if finding.fix:
                lines.append(f"{'':{width + 13}}fix: {one_line(finding.fix)}")
    fatal = ", ".join(finding.name for finding in findings if finding.is_fatal)
    end = f"No run can start until these are fixed: {fatal}." if fatal else "All requirements of every run are met."
    return "\n".join([*lines, "", end])
