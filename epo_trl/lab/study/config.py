"""The YAML file of a study."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from epo_trl.bounds import Count, Share, check_bounds
from epo_trl.errors import InputError
from epo_trl.evaluation.outcomes import LAST_STEPS, SOLVED, TRAPPED, WINDOW
from epo_trl.yaml_files import read_yaml

# Contains the folders `studies` and `recipes`: links to the repository's root, or copies in a wheel.
PACKAGE = Path(__file__).parents[2]
# Fields that the study sets for each run.
OWN_FIELDS = ("seed", "output_dir", "resume_from_checkpoint", "overwrite_output_dir")
_ARM_KEYS = ("recipe", "config", "seeds")


@dataclass(frozen=True, slots=True)
class Part:
    """A recipe with its config.

    Args:
        recipe: Path of the program.
        config: Path of its YAML file.
        changes: Fields that override the file; a mapping is replaced as a whole.
    """

    recipe: Path
    config: Path
    changes: Mapping[str, Any]

    def settings(self) -> dict[str, Any]:
        """Returns the fields of the file with the changes applied."""
        return {**read_yaml(self.config, "config"), **self.changes}


@dataclass(frozen=True, slots=True)
class Arm:
    """One method of the study and its seeds."""

    name: str
    part: Part
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The arms of a comparison and the criteria of the report.

    Args:
        name: Name of its folders.
        path: Path of the YAML file.
        question: Question at the top of the report.
        protocol: Description of the measurement.
        warm_start: Warm start of all runs of one seed; `None` if each uses its own `model_name_or_path`.
        arms: Methods to compare.
        baseline: Name of the arm that the others are compared with.
        window: Number of RL steps at the end of training to average.
        eval_window: Number of evaluations at the end to average.
        smooth: Number of RL steps in the running mean that detects the first step above `solved`.
        solved: Mean success of the window above which a run has solved its task.
        trapped: Mean success of the window below which a run is trapped.
    """

    name: str
    path: Path
    question: str = ""
    protocol: str = ""
    warm_start: Part | None
    arms: tuple[Arm, ...]
    baseline: str
    window: Count = LAST_STEPS
    eval_window: Count = 1
    smooth: Count = WINDOW
    solved: Share = SOLVED
    trapped: Share = TRAPPED

    def __post_init__(self) -> None:
        check_bounds(self)
        for key in ("name", "question", "protocol", "baseline"):
            if not isinstance(getattr(self, key), str):
                raise InputError(f"{key}: expected a string, got {getattr(self, key)!r}")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise InputError(f"name: expected letters, digits, '.', '_' and '-' (it names folders), got {self.name!r}")
        if self.trapped > self.solved:
            raise InputError(f"trapped: expected a share up to that of solved, {self.solved}, got {self.trapped}")

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of all arms, in the order in which they run."""
        return tuple(dict.fromkeys(seed for arm in self.arms for seed in arm.seeds))

    def chosen(self, arms: list[str] | None = None, seeds: list[int] | None = None) -> Study:
        """Returns the study restricted to these arms, with these seeds for each of them.

        Raises:
            InputError: If there is no arm of that name.
        """
        known = [arm.name for arm in self.arms]
        for name in arms or ():
            if name not in known:
                raise InputError(f"--arms: expected names from {_listed(known)}, got {name!r}")
        chosen = tuple(arm for arm in self.arms if arms is None or arm.name in arms)
        if seeds is not None:
            _need_distinct("--seeds", seeds)
            chosen = tuple(replace(arm, seeds=tuple(seeds)) for arm in chosen)
        return replace(self, arms=chosen)

    def joined(self, other: Study) -> Study:
        """Adds the seeds of another study of the same file."""
        more = {arm.name: arm.seeds for arm in other.arms}
        arms = [replace(arm, seeds=tuple(dict.fromkeys([*arm.seeds, *more.get(arm.name, ())]))) for arm in self.arms]
        return replace(self, arms=tuple(arms))


def load_study(path: str | Path) -> Study:
    """Loads a study from a YAML file, or a built-in one by name; docs/study.md explains its keys.

    Paths in it are relative to the current folder. Recipes and configs that are not found there are searched in the
    package.

    Raises:
        InputError: If a key is missing, unknown or of the wrong type. The message names it.
    """
    shipped = {file.stem: file for file in sorted((PACKAGE / "studies").glob("*.yaml"))}
    path = _find(Path(path))
    path = path if path.is_file() else shipped.get(str(path), path)
    if not path.is_file():
        raise InputError(f"CONFIG: expected a YAML file or one of {', '.join(shipped)}, got {str(path)!r}")
    given = read_yaml(path, "CONFIG")
    for key in ("train", "seeds", "arms"):
        if key not in given:
            raise InputError(f"{path}: {key} is missing")
    train, start = _part("train", given.pop("train"), None), given.pop("warm_start", None)
    arms = _arms(given.pop("arms"), train, _seeds("seeds", given.pop("seeds")))
    warm_start = None if start is None else _part("warm_start", start, None)
    known = [each.name for each in fields(Study) if each.name not in ("path", "arms", "warm_start")]
    for key in given:
        if key not in known:
            raise InputError(
                f"{path}: {key}: unknown; expected {', '.join(['train', 'seeds', 'arms', 'warm_start', *known])}"
            )
    given = {"name": path.stem, "baseline": arms[0].name} | given
    arm_names = [arm.name for arm in arms]
    if given["baseline"] not in arm_names:
        raise InputError(f"baseline: expected one of the arms {_listed(arm_names)}, got {given['baseline']!r}")
    return Study(path=path, warm_start=warm_start, arms=arms, **given)


def _find(path: Path) -> Path:
    """Finds a file in the current folder, or else in the package; returns `path` itself if it is in neither.

    So `recipes/sft.py` in a study has the same meaning with and without a clone.
    """
    shipped = PACKAGE / path
    return shipped if not path.is_file() and path.parent.parts and shipped.is_file() else path


def shown(path: Path) -> str:
    """Formats a path for messages: a built-in file's is relative to the package."""
    return (path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path).as_posix()


def _arms(given: Any, train: Part, seeds: tuple[int, ...]) -> tuple[Arm, ...]:
    if not isinstance(given, dict) or not given:
        raise InputError(f"arms: expected 'name: {{field: value}}' for each method, got {given!r}")
    arms = []
    for name, content in given.items():
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise InputError(f"arms: expected names of one line, in quotes where YAML needs them, got {name!r}")
        where, content = f"arms: {name!r}", {} if content is None else content
        own = _seeds(f"{where}: seeds", content["seeds"]) if isinstance(content, dict) and "seeds" in content else seeds
        arms.append(Arm(name, _part(where, content, train), own))
    return tuple(arms)


def _part(where: str, given: Any, base: Part | None) -> Part:
    """Parses a recipe, a config and changes. Missing keys come from the base, if there is one.

    The base's changes apply only to its own config, not to another one.
    """
    if not isinstance(given, dict):
        raise InputError(f"{where}: expected 'field: value' pairs, got {given!r}")
    paths = {}
    for key in ("recipe", "config"):
        if key not in given and base is None:
            raise InputError(f"{where}: {key} is missing")
        if not isinstance(name := given.get(key, ""), str):
            raise InputError(f"{where}: {key}: expected a string, got {name!r}")
        paths[key] = _find(Path(name)) if key in given else getattr(base, key)
        if not paths[key].is_file():
            raise InputError(f"{where}: {key}: expected a file, got {paths[key]}; paths start in the current folder")
    inherited = base.changes if base is not None and "config" not in given else {}
    if base is None and "seeds" in given:
        raise InputError(f"{where}: seeds: not allowed here; write them at the top level, or in an arm for that arm")
    changes = {key: value for key, value in given.items() if key not in _ARM_KEYS}
    for key in changes:
        if not isinstance(key, str):
            raise InputError(f"{where}: expected names of fields, got {key!r}")
        if key in OWN_FIELDS:
            raise InputError(f"{where}: {key}: the study sets it for each run; remove it")
    return Part(**paths, changes={**inherited, **changes})


def _seeds(where: str, given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or not given or not all(type(seed) is int and seed >= 0 for seed in given):
        raise InputError(f"{where}: expected a list of integers >= 0, for example [0, 1, 2], got {given!r}")
    _need_distinct(where, given)
    return tuple(given)


def _need_distinct(where: str, seeds: list[int]) -> None:
    twice = [seed for seed, count in Counter(seeds).items() if count > 1]
    if twice:
        raise InputError(f"{where}: expected each seed once, got {twice[0]} more than once")


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))
