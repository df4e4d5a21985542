"""Validates the configs of all runs, with the recipes, before the first run starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from epo_trl.long_runs.state_file import read_state, write_state
from epo_trl.study.config import StudyError
from epo_trl.study.record import write_text
from epo_trl.study.run_plan import StudyRun

CHECKED = "_checked.json"  # in the folder of the runs: digests of the runs with valid configs


def check_configs(runs: Sequence[StudyRun], folder: Path, environment: dict[str, str]) -> None:
    """Lets each recipe validate the configs of its runs, once per config. Costs about the time to load torch.

    Args:
        runs: Runs that will be started.
        folder: Folder of the runs.
        environment: Environment variables of the processes.

    Raises:
        StudyError: If a recipe rejects a config. The message names arm and field.
    """
    file = folder / CHECKED
    right = set(read_state(file, "digests")["digests"]) if file.is_file() else set()
    by_recipe: dict[Path, dict[str, StudyRun]] = {}
    for run in runs:
        if run.digest not in right:
            by_recipe.setdefault(run.recipe, {}).setdefault(str(run.arm), run)  # seeds do not affect the check
    asked = [_ask(recipe, list(each.values()), folder / "_check", environment) for recipe, each in by_recipe.items()]
    stderr = [process.communicate()[1].strip() for process in asked]
    wrong = [text[-3000:] for text, process in zip(stderr, asked, strict=True) if process.returncode]
    if wrong:
        raise StudyError("; ".join("; ".join(wrong).splitlines()).replace(f"{folder / '_check'}{os.sep}", ""))
    write_state(file, {"digests": sorted(right | {run.digest for run in runs})})


def _ask(recipe: Path, runs: Sequence[StudyRun], folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    files = [folder / f"{run.name}.yaml" for run in runs]
    for run, file in zip(runs, files, strict=True):
        write_text(file, yaml.safe_dump(dict(run.settings), allow_unicode=True))
    beside = dict.fromkeys(str(run.config.parent.resolve()) for run in runs)
    path = os.pathsep.join([*beside, *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, str(recipe), "--check", *map(str, files)]
    return subprocess.Popen(command, env={**environment, "PYTHONPATH": path}, stdout=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, text=True)  # fmt: skip
