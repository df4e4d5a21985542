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
    """One game, not yet parsed by an engine.

    Args:
        source: Path or task id, for messages.
        problem: PDDL problem: initial state and goal.
        domain: PDDL domain: rules.
        grammar: TextWorld grammar: the texts, including the task sentence.
        walkthrough: Actions that win, or `()` if none is stored.
    """

    source: str
    problem: str
    domain: str
    grammar: str
    walkthrough: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        """Natural-language description of the task, for example `"put two soapbar in drawer"`."""
        match = TASK_SENTENCE.search(self.grammar)
        if match is None:
            raise EnvError(f"{self.source}: the grammar has no sentence 'Your task is to: ...'. {_FIX}")
        return match.group(1)

    def as_json(self) -> str:
        """Serializes the game as the content of a `game.tw-pddl` file."""
        return json.dumps(
            {
                "pddl_domain": self.domain,
                "grammar": self.grammar,
                "pddl_problem": self.problem,
                "solvable": bool(self.walkthrough),
                "walkthrough": list(self.walkthrough),
            }
        )


def without_task(grammar: str) -> str:
    """Returns a grammar without the task in its task sentence: the part that all games of one source share."""
    return TASK_SENTENCE.sub('Your task is to: TASK."', grammar)


def load_game(path: Path) -> Game:
    """Loads a game from a `game.tw-pddl` file.

    Raises:
        EnvError: If the file cannot be read or is not a game. The message names the path.
    """
    data = _read_json(path)
    problem, domain, grammar = (data.get(key) for key in ("pddl_problem", "pddl_domain", "grammar"))
    if not (isinstance(problem, str) and isinstance(domain, str) and isinstance(grammar, str)):
        raise EnvError(f"{path}: 'pddl_problem', 'pddl_domain' or 'grammar' is missing. {_FIX}")
    walkthrough = data.get("walkthrough") or []
    if not (isinstance(walkthrough, list) and all(isinstance(action, str) for action in walkthrough)):
        raise EnvError(f"{path}: 'walkthrough': expected a list of actions, got {walkthrough!r:.100}. {_FIX}")
    return Game(str(path), problem, domain, grammar, walkthrough=tuple(walkthrough))


@dataclass(frozen=True, slots=True)
class FoundGames:
    """The games of a folder.

    Args:
        games: The playable game files, sorted.
        left_out: Maps each reason to the trial folders left out for it: `BY_RULE`, `OTHER_TYPE`, `UNSOLVED`, and
            `NO_GAME` and `NO_DESCRIPTION` for incomplete folders.
    """

    games: tuple[Path, ...]
    left_out: dict[str, tuple[Path, ...]]

    @property
    def missing(self) -> dict[str, tuple[Path, ...]]:
        """The part of `left_out` that is incomplete on disk."""
        return {why: folders for why, folders in self.left_out.items() if why in (NO_GAME, NO_DESCRIPTION)}

    def __str__(self) -> str:
        counts = [f"{len(folders)} {why}" for why, folders in self.left_out.items()]
        return f"{len(self.games)} games; left out: {', '.join(counts) or 'none'}"


BY_RULE = "with movable receptacles or sliced objects"
OTHER_TYPE = "of other task types"
UNSOLVED = "not marked as solvable"
NO_GAME = f"without {GAME_FILE}"
NO_DESCRIPTION = f"without {DESCRIPTION_FILE}"


def find_games(folder: Path, task_types: tuple[str, ...]) -> FoundGames:
    """Finds the playable games below a folder, by `AlfredTWEnv`'s rules, and the folders left out.

    Args:
        folder: For example `.../json_2.1.1/train`, or any folder above or below it.
        task_types: Task types to keep.

    Raises:
        EnvError: If a file is corrupt.
    """
    games: list[Path] = []
    left_out: dict[str, list[Path]] = {}
    folder = folder.absolute()  # not resolved: it may be a link to another disk, and ids are relative to the link
    files = [*folder.rglob(DESCRIPTION_FILE), *folder.rglob(GAME_FILE)]
    for trial in sorted({path.parent for path in files}):
        if trial.name.startswith("."):  # left behind by a killed `write_games`
            continue
        why = _why_left_out(trial, task_types)
        if why:
            left_out.setdefault(why, []).append(trial)
        else:
            games.append(trial / GAME_FILE)
    return FoundGames(tuple(games), {why: tuple(folders) for why, folders in sorted(left_out.items())})


def _why_left_out(trial: Path, task_types: tuple[str, ...]) -> str:
    """Returns the reason to leave out a trial folder, or `""`."""
    name = f"{trial.parent.name}/{trial.name}"
    if "movable" in name or "Sliced" in name:
        return BY_RULE
    described = (trial / DESCRIPTION_FILE).is_file()
    task_type = _read_json(trial / DESCRIPTION_FILE).get("task_type") if described else name.partition("-")[0]
    if task_type not in task_types:
        return OTHER_TYPE
    if not (trial / GAME_FILE).is_file():
        return NO_GAME
    if not described:
        return NO_DESCRIPTION
    return "" if _read_json(trial / GAME_FILE).get("solvable") else UNSOLVED


def _read_json(path: Path) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EnvError(f"{path}: not readable as JSON ({error}). {_FIX}") from error
    if not isinstance(data, dict):
        raise EnvError(f"{path}: expected a JSON object, got {type(data).__name__}. {_FIX}")
    return data
