"""A game as text, and the game files of ALFWorld's own folder layout."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from epo_trl.envs.base import EnvError

SPLIT_FOLDERS = {"train": "train", "iid": "valid_seen", "ood": "valid_unseen"}
GAME_FILE = "game.tw-pddl"
_MEND = "Delete its folder and run `alfworld-download` (real games) or `epo-trl games alfworld --out DIR` (generated)."


@dataclass(frozen=True, slots=True)
class Game:
    """One game, before an engine has read it.

    Args:
        source: Path or task id, for messages.
        problem: PDDL problem: what is where, and the goal.
        domain: PDDL domain: the rules.
        grammar: TextWorld grammar: the texts, the task sentence among them.
        walkthrough: Actions that win, or `()` where none is stored.
    """

    source: str
    problem: str
    domain: str
    grammar: str
    walkthrough: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        """The task in words, for example `"put two soapbar in drawer"`."""
        match = re.search(r"Your task is to: (.*?)\.\"", self.grammar)
        if match is None:
            raise EnvError(f"{self.source}: the grammar has no sentence 'Your task is to: ...'. {_MEND}")
        return match.group(1)

    def as_json(self) -> str:
        """Returns the content of a `game.tw-pddl` file."""
        return json.dumps(
            {
                "pddl_domain": self.domain,
                "grammar": self.grammar,
                "pddl_problem": self.problem,
                "solvable": bool(self.walkthrough),
                "walkthrough": list(self.walkthrough),
            }
        )


def load_game(path: Path) -> Game:
    """Returns the game stored in a `game.tw-pddl` file.

    Raises:
        EnvError: If the file cannot be read or is not a game. The message names the path.
    """
    data = _read_json(path)
    problem, domain, grammar = (data.get(key) for key in ("pddl_problem", "pddl_domain", "grammar"))
    if not (isinstance(problem, str) and isinstance(domain, str) and isinstance(grammar, str)):
        raise EnvError(f"{path}: 'pddl_problem', 'pddl_domain' or 'grammar' is missing. {_MEND}")
    return Game(str(path), problem, domain, grammar, walkthrough=tuple(data.get("walkthrough") or ()))


def find_games(folder: Path, task_types: tuple[str, ...]) -> list[Path]:
    """Returns the playable game files below a folder, sorted: the ones that `AlfredTWEnv` would play.

    Left out are games with movable receptacles or sliced objects, games of other task types, folders without a game
    file, and games that are not marked as solvable.

    Args:
        folder: For example `.../json_2.1.1/train`.
        task_types: Task types to keep.

    Raises:
        EnvError: If a file is damaged.
    """
    found = []
    for description in sorted(folder.rglob("traj_data.json")):
        path = description.parent / GAME_FILE
        name = str(path.relative_to(folder))
        if "movable" in name or "Sliced" in name or not path.is_file():
            continue
        if _read_json(description).get("task_type") in task_types and _read_json(path).get("solvable"):
            found.append(path)
    return found


def _read_json(path: Path) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EnvError(f"{path}: not readable as JSON ({error}). {_MEND}") from error
    if not isinstance(data, dict):
        raise EnvError(f"{path}: got {type(data).__name__}, expected a JSON object. {_MEND}")
    return data
