"""The two ALFWorld task suites: generated games, and the real games from `alfworld-download`."""

from __future__ import annotations

import math
import os
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, ClassVar

from epo_trl.bounds import CountOrZero, OneOf, check_bounds, copy_options, option
from epo_trl.envs.alfworld.engine import State
from epo_trl.envs.alfworld.env import ENGINES, AlfworldEnv, Opened
from epo_trl.envs.alfworld.expert import AlfworldExpert, parse_kind
from epo_trl.envs.alfworld.game_files import GAME_FILE, SPLIT_FOLDERS, Game, find_games, load_game
from epo_trl.envs.alfworld.generator import SET_FILE, generate
from epo_trl.envs.alfworld.pddl import TASK_TYPES
from epo_trl.envs.alfworld.scene import Scene
from epo_trl.envs.alfworld.task_specs import Filters, task_specs
from epo_trl.envs.alfworld.textworld_engine import TextWorldEngine
from epo_trl.envs.base import EnvError, TaskSuite, split_task_id, stratified_sample

_CACHED_GAMES = 1024
Engine = Annotated[str, OneOf(ENGINES)]
Search = Annotated[str, OneOf(("random", "likely"))]
_EVERY = 4  # one in four training games is counted


@lru_cache(maxsize=_CACHED_GAMES)
def _generated_scene(split: str, index: int, seed: int, filters: Filters) -> Scene:
    return Scene.of(generate(split, index, seed, filters).game)


@lru_cache(maxsize=_CACHED_GAMES)
def _stored_scene(path: Path) -> Scene:
    return Scene.of(load_game(path))


class _AlfworldSuite(TaskSuite):
    """The common part of both suites: the choice of the engine, and the expert."""

    protocol = "alfworld50"
    prompt_template = "alfworld"
    engine: str
    expert_search: str

    def __post_init__(self) -> None:
        check_bounds(self)
        self.instant = self.engine == "fast"

    def make_env(self) -> AlfworldEnv:
        """Creates a fresh environment. Environments of one process share the games that they have read."""
        if self.engine == "fast":
            return AlfworldEnv(self._open_fast)
        engine = TextWorldEngine()

        def open_stock(task_id: str) -> Opened:
            game, task_type = self._game(task_id)
            return Opened(engine.start(game), game.task, task_type)

        return AlfworldEnv(open_stock, engine.close)

    def make_expert(self, seed: int = 0) -> AlfworldExpert:
        """Creates an expert, which reads observations, the type of the task and the admissible actions."""
        return AlfworldExpert(seed, self._odds if self.expert_search == "likely" else None)

    @cached_property
    def _odds(self) -> dict[tuple[str, str], float]:
        """Mean number of objects of a kind on a receptacle of a kind, over a quarter of the training games."""
        places: Counter[str] = Counter()
        things: Counter[tuple[str, str]] = Counter()
        ids = self.task_ids("train")
        for task_id in stratified_sample(ids, math.ceil(len(ids) / _EVERY)):
            scene = self._scene(task_id)
            places.update(map(parse_kind, scene.receptacles))
            for place, content in scene.start.contents.items():
                things.update((parse_kind(thing), parse_kind(place)) for thing in content)
        return {(thing, place): count / places[place] for (thing, place), count in things.items()}

    def _open_fast(self, task_id: str) -> Opened:
        scene = self._scene(task_id)
        return Opened(State(scene), scene.task, scene.goal.task_type)

    @abstractmethod
    def _game(self, task_id: str) -> tuple[Game, str]:
        """Returns a game and its task type."""

    @abstractmethod
    def _scene(self, task_id: str) -> Scene:
        """Returns a game as parsed by the fast engine."""


@dataclass(eq=False)
class GeneratedAlfworld(_AlfworldSuite):
    """ALFWorld-style games, generated when they are first played. Needs no download.

    "train" and "iid" use ALFRED's training rooms and share no (task type, object, target, room); "ood" uses ALFRED's
    held-out rooms. Scores are not comparable with published ALFWorld numbers.

    The fields are options of `AlfworldArguments`; `seed` is its `games_seed`. A split of 0 games does not exist.

    Raises:
        EpoTrlError: If a setting is invalid, or leaves no game of a split.
    """

    name = "alfworld-generated"

    n_train: CountOrZero = 1000
    n_iid: CountOrZero = 100
    n_ood: CountOrZero = 100
    seed: int = 0
    task_types: Sequence[str] | None = None
    room_types: Sequence[str] | None = None
    max_receptacles: int | None = None
    engine: Engine = "fast"
    expert_search: Search = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.filters = Filters(self.task_types, self.room_types, self.max_receptacles)  # type: ignore[arg-type]
        self.sizes = {"train": self.n_train, "iid": self.n_iid, "ood": self.n_ood}
        self.splits = tuple(split for split, size in self.sizes.items() if size)
        for split in self.splits:
            task_specs(split, self.filters)

    def task_ids(self, split: str) -> list[str]:
        """Returns `"train/0"`, `"train/1"`, and so on."""
        self.check_split(split)
        return [f"{split}/{index}" for index in range(self.sizes[split])]

    def _place(self, task_id: str) -> tuple[str, int, int, Filters]:
        return *split_task_id(task_id, self.sizes), self.seed, self.filters

    def _game(self, task_id: str) -> tuple[Game, str]:
        generated = generate(*self._place(task_id))
        return generated.game, generated.spec.task_type

    def _scene(self, task_id: str) -> Scene:
        return _generated_scene(*self._place(task_id))


@dataclass(eq=False)
class AlfworldData(_AlfworldSuite):
    """ALFWorld games on disk: the real ones (`alfworld-download`) or those of `write_games`.

    Reports name the latter "alfworld-generated". Like `AlfredTWEnv`, leaves out games with movable receptacles or
    sliced objects and games not marked as solvable. `path` is the folder that contains `json_2.1.1`, or that folder
    itself, by default `$ALFWORLD_DATA`; the other fields are options of `AlfworldArguments`.

    Raises:
        EpoTrlError: If a setting is invalid, or there is no such folder. `task_ids` reads every game of its split; it
            warns of folders that lack a file, and raises for a corrupt file and, with the fast engine, if the engine
            does not support the first game.
    """

    name = "alfworld"

    path: str | os.PathLike[str] | None = None
    task_types: Sequence[str] | None = None
    engine: Engine = "fast"
    expert_search: Search = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._types = Filters(self.task_types).task_types or TASK_TYPES  # type: ignore[arg-type]
        self.root = data_folder(self.path).resolve()
        if (self.root.parent / SET_FILE).is_file():
            self.name = GeneratedAlfworld.name
        self._ids: dict[str, list[str]] = {}

    def task_ids(self, split: str) -> list[str]:
        """Returns the games' folders relative to `json_2.1.1`, sorted."""
        self.check_split(split)
        if split not in self._ids:
            folder = self.root / SPLIT_FOLDERS[split]
            games, incomplete = find_games(folder, self._types)
            if not games:
                raise EnvError(f"{folder}: no playable games here. {_HOW_TO_GET}")
            if incomplete:
                warnings.warn(
                    f"{folder}: {len(games)} games, but {len(incomplete)} folders lack a file, for example "
                    f"{incomplete[0]}; numbers on this list are not comparable with those on the complete list. Run "
                    "the download or `epo-trl games alfworld` again, or delete these folders if they never had a game.",
                    stacklevel=2,
                )
            if self.engine == "fast":
                _stored_scene(games[0])
            self._ids[split] = [path.parent.relative_to(self.root).as_posix() for path in games]
        return list(self._ids[split])

    def _path(self, task_id: str) -> Path:
        place = Path(task_id)
        path = self.root / place / GAME_FILE
        if place.is_absolute() or ".." in place.parts or not os.path.isfile(path):  # Path.is_file raises for long names
            raise EnvError(f"task_id: expected a folder below {self.root} that holds {GAME_FILE}, got {task_id!r:.100}")
        return path

    def _game(self, task_id: str) -> tuple[Game, str]:
        return load_game(self._path(task_id)), Path(task_id).parent.name.split("-")[0]

    def _scene(self, task_id: str) -> Scene:
        return _stored_scene(self._path(task_id))


_HOW_TO_GET = (
    "Set games to generated (--games generated) for games that need no download. For others run `alfworld-download` "
    "(the real games) or `epo-trl games alfworld --out DIR`, and set ALFWORLD_DATA or alfworld_data to that folder."
)


def data_folder(path: str | os.PathLike[str] | None = None) -> Path:
    """Finds the `json_2.1.1` folder below a path, or below `$ALFWORLD_DATA`; `EnvError` if there is no such folder."""
    given = os.fspath(path) if path is not None else os.environ.get("ALFWORLD_DATA", "")
    base = Path(os.path.expandvars(given)).expanduser()
    for folder in (base / "json_2.1.1", base) if given else ():
        if any((folder / name).is_dir() for name in SPLIT_FOLDERS.values()):
            return folder
    raise EnvError(f"alfworld_data or ALFWORLD_DATA: expected a folder with json_2.1.1, got {given!r}. {_HOW_TO_GET}")


@dataclass
class AlfworldArguments:
    """The choice of ALFWorld games and engine."""

    # Settings that a resumed run may change: they do not change what is learned.
    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset("alfworld_data n_iid n_ood".split())

    games: Annotated[str, OneOf(("data", "generated"))] = option(
        "data", "'data': the games in alfworld_data; 'generated': games made on the fly, no download."
    )
    alfworld_data: str | None = option(None, "Folder of the games; by default $ALFWORLD_DATA. For games='data'.")
    engine: Engine = option("fast", "'fast' (built in) or 'textworld' (ALFWorld's own).")
    task_types: list[str] | None = option(None, "Task types to include; all by default.")
    expert_search: Search = option(
        "random", "How the expert searches: 'random', or 'likely': first where training games have such objects."
    )
    n_train: CountOrZero = option(4000, "Number of generated training games.")
    n_iid: CountOrZero = option(200, "Number of generated test games in the training rooms.")
    n_ood: CountOrZero = option(200, "Number of generated test games in held-out rooms.")
    games_seed: int = option(0, "Seed of the generated games.")
    room_types: list[str] | None = option(
        None, "Rooms of generated games, from kitchens, livingrooms, bedrooms and bathrooms; all by default."
    )
    max_receptacles: int | None = option(
        None, "Maximum number of receptacles in a generated room; no limit by default."
    )

    def __post_init__(self) -> None:
        check_bounds(self)

    def make_suite(self) -> TaskSuite:
        """Creates the task suite."""
        if self.games == "data":
            return copy_options(AlfworldData, self, path=self.alfworld_data)
        return copy_options(GeneratedAlfworld, self, seed=self.games_seed)
