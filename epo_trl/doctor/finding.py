"""The result of one check of the doctor."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from shlex import join


class State(StrEnum):
    """Result of a check."""

    OK = "ok"
    MISSING = "missing"  # absent, and only some runs need it
    BROKEN = "broken"  # present, but does not work
    NOT_ASKED = "not asked"


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
