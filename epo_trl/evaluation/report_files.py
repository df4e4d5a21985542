"""The files in which a run keeps the reports of its evaluations."""

from __future__ import annotations

import os
import re
from pathlib import Path

REPORTS = "evaluations"  # folder in a run's `output_dir`


def report_file(output_dir: str | os.PathLike[str], step: int) -> Path:
    """Returns the file for the reports of the evaluation after an optimizer step."""
    return Path(output_dir) / REPORTS / f"step_{step:06d}.json"


def report_files(output_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """Returns the existing files by optimizer step, in order. A copy under another name is left out."""
    files = (Path(output_dir) / REPORTS).glob("step_*.json")
    found = [(int(name[1]), path) for path in files if (name := re.fullmatch(r"step_(\d+)", path.stem))]
    return dict(sorted(found))
