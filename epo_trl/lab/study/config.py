"""The YAML file of a study, and the runs that it plans."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from epo_trl.bounds import Count, Share, check_bounds
from epo_trl.errors import InputError
from epo_trl.evaluation.outcomes import LAST_STEPS, SOLVED, TRAPPED, WINDOW
from epo_trl.yaml_files import read_yaml

# Contains the folders `studies` and `recipes`: links to the repository's root, or copies in a wheel.
PACKAGE = Path(__file__).parents[2]
WARM_START = "warm-start"
# Fields that the study sets for each run.
OWN_FIELDS = ("seed", "seeds", "output_dir", "resume_from_checkpoint", "overwrite_output_dir")


@dataclass(frozen=True, slots=True)
class Arm:
    """A method of the study, or its warm start."""

    name: str
    recipe: Path  # the program
    config: Path  # its YAML file
    changes: Mapping[str, Any]  # fields that override the file; a mapping is replaced as a whole
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The arms of a comparison and the criteria of the report; docs/study.md explains the fields."""

    name: str  # of its folders
    path: Path  # the YAML file
    question: str = ""
    protocol: str = ""
    warm_start: Arm | None  # of all runs of one seed; `None` if each uses its own `model_name_or_path`
    arms: tuple[Arm, ...]
    baseline: str
    window: Count = LAST_STEPS
    eval_window: Count = 1
    smooth: Count = WINDOW
    solved: Share = SOLVED
    trapped: Share = TRAPPED

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of all arms, in the order in which they run."""
        return tuple(dict.fromkeys(seed for arm in self.arms for seed in arm.seeds))

    def chosen(self, arms: list[str] | None = None, seeds: list[int] | None = None) -> Study:
        """Returns the study restricted to these arms, with these seeds for each of them."""
        known = [arm.name for arm in self.arms]
        for name in arms or ():
            if name not in known:
                raise InputError(f"--arms: expected names from {', '.join(map(repr, known))}, got {name!r}")
        chosen = [arm for arm in self.arms if arms is None or arm.name in arms]
        return replace(self, arms=tuple(replace(arm, seeds=_distinct(seeds or arm.seeds)) for arm in chosen))

    def joined(self, other: Study) -> Study:
        """Adds the seeds of another study of the same file."""
        more = {arm.name: arm.seeds for arm in other.arms}
        arms = (replace(arm, seeds=_distinct([*arm.seeds, *more.get(arm.name, ())])) for arm in self.arms)
        return replace(self, arms=tuple(arms))


def load_study(path: str | Path) -> Study:
    """Loads a study from a YAML file, or a built-in one by name; docs/study.md explains its keys.

    Paths in it are relative to the current folder. Recipes and configs that are not found there are searched in the
    package.
    """
    path = _find(Path(path))
    shipped = PACKAGE / "studies" / f"{path}.yaml"
    path = shipped if shipped.is_file() and not path.is_file() else path
    given = read_yaml(path, "CONFIG")
    try:
        train, start = _arm("train", given.pop("train")), given.pop("warm_start", None)
        seeds, arms = given.pop("seeds"), given.pop("arms")
        listed = tuple(_arm(str(name), {"seeds": seeds, **(own or {})}, train) for name, own in arms.items())
        given = {"name": path.stem, "baseline": listed[0].name} | given
        if given["baseline"] not in (names := [arm.name for arm in listed]):
            raise InputError(f"baseline: expected one of the arms {', '.join(names)}, got {given['baseline']!r}")
        return Study(path=path, warm_start=start and _arm("warm_start", start), arms=listed, **given)
    except (AttributeError, LookupError, TypeError) as error:
        raise InputError(f"{path}: expected train, seeds, arms and other keys of docs/study.md ({error!r})") from error


def _find(path: Path) -> Path:
    """Finds a file in the current folder, or else in the package; returns `path` itself if it is in neither.

    So `recipes/sft.py` in a study has the same meaning with and without a clone.
    """
    shipped = PACKAGE / path
    return shipped if not path.is_file() and path.parent.parts and shipped.is_file() else path


def shown(path: Path) -> str:
    """Formats a path for messages: a built-in file's is relative to the package."""
    return (path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path).as_posix()


def _arm(name: str, given: Mapping[str, Any], base: Arm | None = None) -> Arm:
    """Parses a recipe, a config and changes. Missing keys come from the base, if there is one.

    The base's changes apply only to its own config, not to another one.
    """
    paths = {
        key: _find(Path(given[key])) if key in given or base is None else getattr(base, key)
        for key in ("recipe", "config")
    }
    inherited = base.changes if base is not None and "config" not in given else {}
    changes = {**inherited, **{key: value for key, value in given.items() if key not in paths}}
    seeds = () if base is None else _distinct(changes.pop("seeds"))
    return Arm(name, **paths, changes=changes, seeds=seeds)


def _distinct(seeds: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(seeds))


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One run of a recipe."""

    arm: str | None  # name of the method; `None` for a warm start
    seed: int
    folder: Path
    recipe: Path
    config: Path  # the original one; modules beside it can be imported
    settings: Mapping[str, Any]  # all fields passed to the program
    identity: Mapping[str, Any]  # all that determines the result, also of the warm start, as JSON; no output path
    needs: StudyRun | None = None  # the warm start that this run begins with

    @property
    def name(self) -> str:
        """Name of its folder and of its record."""
        return self.folder.name


def plan(study: Study, folder: Path) -> list[StudyRun]:
    """Builds the runs of the arms, each with a folder in `folder`, seed by seed, so that complete pairs come first."""
    names, start = folder_names([arm.name for arm in study.arms]), study.warm_start
    starts = {seed: _run(start, None, seed, folder / f"{WARM_START}-seed{seed}") for seed in study.seeds if start}
    return [
        _run(arm, arm.name, seed, folder / f"{names[arm.name]}-seed{seed}", starts.get(seed))
        for seed in study.seeds
        for arm in study.arms
        if seed in arm.seeds
    ]


def folder_names(names: Iterable[str]) -> dict[str, str]:
    """Maps names to file names of letters, digits, '.', '_' and '-' that are distinct on any file system.

    A file name does not depend on the other arms, so an arm keeps its results when others are added.
    """
    taken = {WARM_START: WARM_START}
    for name in names:
        short = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.").lower() or "arm"
        if short in taken:
            raise InputError(f"arms: {taken[short]!r} and {name!r} would share the folder {short!r}; rename one")
        taken[short] = name
    return {name: short for short, name in taken.items() if short != WARM_START}


def _run(arm: Arm, name: str | None, seed: int, folder: Path, warm_start: StudyRun | None = None) -> StudyRun:
    given = {**read_yaml(arm.config, "config"), **arm.changes}
    begin = {} if warm_start is None else {"model_name_or_path": str(warm_start.folder)}
    for key in (*OWN_FIELDS, *begin):
        if key in arm.changes:
            raise InputError(f"{arm.name}: {key}: the study sets it for each run; remove it")
    if given.get("save_strategy") in ("no", False):
        raise InputError(
            f"{arm.name}: save_strategy: expected 'steps' or 'epoch', since the log is in checkpoints, got 'no'"
        )
    settings = {**given, **begin, "seed": seed, "output_dir": str(folder)}
    others = ("seed", "output_dir", "resume_with_changes", *begin)
    identity = {
        "recipe": shown(arm.recipe),
        "seed": seed,
        "fields": {key: value for key, value in given.items() if key not in others},
        "warm_start": None if warm_start is None else warm_start.identity,
    }
    identity = json.loads(json.dumps(identity, default=str))
    return StudyRun(name, seed, folder, arm.recipe, arm.config, settings, identity, warm_start)
