"""What the doctor says of one thing."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from shlex import join


class State(StrEnum):
    """How a thing is."""

    OK = "ok"
    MISSING = "missing"  # not there, which not every run minds
    BROKEN = "broken"  # there, and does not work
    NOT_ASKED = "not asked"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Args:
        part: Heading under which the finding is listed.
        name: Name of the checked item.
        state: Result of the check.
        says: Description of the result.
        mend: The command that mends it, or `""`.
        needed: Whether no run works without it.
    """

    part: str
    name: str
    state: State
    says: str
    mend: str = ""
    needed: bool = False

    @property
    def is_fatal(self) -> bool:
        """Whether nothing can run as it is."""
        return self.needed and self.state is not State.OK


def pip_install(requirement: str, *options: str) -> str:
    """Returns the command that installs a requirement for this Python, whichever `pip` comes first on PATH."""
    pip = shutil.which("pip")
    here = pip is not None and Path(pip).parent == Path(sys.executable).parent
    words: Sequence[str] = ["pip"] if here else [sys.executable, "-m", "pip"]
    return join([*words, "install", *options, requirement])
