"""Imports modules in another process, so that a damaged one cannot end this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CHILD = Path(__file__).with_name("child.py")
SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Imported:
    """Result of an import.

    Args:
        error: The exception, or the way in which the process ended; `""` if the import works.
        version: The module's version; `""` if it has none.
        facts: Further facts about the module, see `child.FACTS`.
    """

    error: str = ""
    version: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def import_all(names: Sequence[str], *, seconds: float = SECONDS) -> dict[str, Imported]:
    """Imports each module and returns the results. After one that ends the process, a new process imports the rest.

    Args:
        names: Module names.
        seconds: Time limit of a process.
    """
    found: dict[str, Imported] = {}
    rest = list(names)
    while rest:
        lines, end = _run(rest, seconds)
        found |= {line["name"]: Imported(line["error"], line["version"], line["facts"]) for line in lines}
        rest = [name for name in rest if name not in found]
        if rest:
            found[rest.pop(0)] = Imported(error=end)
    return found


def _run(names: Sequence[str], seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Runs one process; returns its lines and a description of its end."""
    command = [sys.executable, str(CHILD), json.dumps(sys.path), json.dumps(list(names))]
    with TemporaryDirectory() as folder:  # importing alfworld creates the folder of its games
        environ = {**os.environ, "ALFWORLD_DATA": folder}
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=seconds, env=environ
            )
            output, end = done.stdout, f"the import ended the process ({_exit(done.returncode)})"
        except subprocess.TimeoutExpired as error:
            output, end = error.stdout or b"", f"the import did not end in {seconds:g} seconds"
    return [json.loads(line) for line in output.splitlines() if line.endswith(b"}")], end


def _exit(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit code {status}"
