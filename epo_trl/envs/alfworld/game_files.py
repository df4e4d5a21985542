"""A game's texts, and the game files in ALFWorld's folder layout."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from epo_trl.envs.base import EnvError

SPLIT_FOLDERS = {"train": "train", "iid": "valid_seen", "ood": "valid_unseen"}
TASK_SENTENCE = re.compile(r"Your task is to: (.*?)\.\"")  # in a grammar
GAME_FILE = "game.tw-pddl"
DESCRIPTION_FILE = "traj_data.json"
_FIX = "Delete its folder and run `alfworld-download` (real games) or `epo-trl games alfworld --out DIR` (generated)."


@dataclass(frozen=True, slots=True)
class Game:
    """One game, not yet parsed by an engine."""

    source: str  # path or task id, for messages
    problem: str  # PDDL problem: initial state and goal
    domain: str  # PDDL domain: rules
    grammar: str  # TextWorld grammar: the texts, including the task sentence

    @property
    def task(self) -> str:
        """Natural-language description of the task, for example `"put two soapbar in drawer"`."""
        return TASK_SENTENCE.findall(self.grammar)[0]

    def as_json(self) -> str:
        """Serializes the game as the content of a `game.tw-pddl` file."""
        texts = {"pddl_domain": self.domain, "grammar": self.grammar, "pddl_problem": self.problem}
        return json.dumps({**texts, "solvable": True})


def without_task(grammar: str) -> str:
    """Returns a grammar without the task in its task sentence: the part that all games of one source share."""
    return TASK_SENTENCE.sub('Your task is to: TASK."', grammar)


def load_game(path: Path) -> Game:
    """Loads a game from a `game.tw-pddl` file.

    Raises:
        EnvError: If the file is not JSON. The message names the path.
    """
    data = _read_json(path)
    return Game(str(path), data["pddl_problem"], data["pddl_domain"], data["grammar"])


def find_games(folder: Path, task_types: tuple[str, ...]) -> tuple[list[Path], list[Path]]:
    """Returns the playable game files below a folder, by `AlfredTWEnv`'s rules, and the trial folders that lack a file.

    Games with movable receptacles or sliced objects, of other types, or not marked as solvable are left out.

    Raises:
        EnvError: If a file is corrupt.
    """
    games: list[Path] = []
    incomplete: list[Path] = []
    folder = folder.absolute()  # not resolved: it may be a link to another disk, and ids are relative to the link
    for trial in sorted({path.parent for name in (DESCRIPTION_FILE, GAME_FILE) for path in folder.rglob(name)}):
        task, file = trial.parent.name, trial / GAME_FILE
        if "movable" in task or "Sliced" in task or task.partition("-")[0] not in task_types:
            continue
        if not (file.is_file() and (trial / DESCRIPTION_FILE).is_file()):
            incomplete.append(trial)
        elif _read_json(file).get("solvable"):
            games.append(file)
    return games, incomplete


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EnvError(f"{path}: not readable as JSON ({error}). {_FIX}") from error
