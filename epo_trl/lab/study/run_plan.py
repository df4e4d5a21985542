"""Builds the runs of a study: folders, settings, and the identity by which two runs are the same."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epo_trl.errors import InputError
from epo_trl.lab.study.config import Part, Study, shown

WARM_START = "warm-start"


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One run of a recipe.

    Args:
        arm: Name of the method; `None` for a warm start.
        seed: Seed of the run.
        folder: Output folder.
        recipe: Path of the program.
        config: Path of the original config; modules beside it can be imported.
        settings: All fields passed to the program.
        identity: Everything that determines the result, as JSON values: recipe and fields, including the warm start's,
            without output paths.
        needs: StudyRun whose output this run starts from; `None` if it needs none.
    """

    arm: str | None
    seed: int
    folder: Path
    recipe: Path
    config: Path
    settings: Mapping[str, Any]
    identity: Mapping[str, Any]
    needs: StudyRun | None = None

    @property
    def name(self) -> str:
        """Name of its folder and its files."""
        return self.folder.name

    @property
    def digest(self) -> str:
        """Checksum of its identity."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]


def plan(study: Study, folder: Path) -> list[StudyRun]:
    """Builds the runs of the arms, seed by seed, so that complete pairs come first.

    Args:
        study: Study to run.
        folder: Folder in which runs get their folders.

    Raises:
        InputError: If two arms would share a folder, or a field is not allowed in a run of a study.
    """
    names = folder_names([arm.name for arm in study.arms])
    start = study.warm_start
    warm_starts = {seed: _run(None, start, seed, folder / f"{WARM_START}-seed{seed}") for seed in study.seeds if start}
    return [
        _run(arm.name, arm.part, seed, folder / f"{names[arm.name]}-seed{seed}", warm_starts.get(seed))
        for seed in study.seeds
        for arm in study.arms
        if seed in arm.seeds
    ]


def folder_names(names: Iterable[str]) -> dict[str, str]:
    """Maps names to file names of letters, digits, '.', '_' and '-' that are distinct on any file system.

    A file name does not depend on the other arms, so an arm keeps its results when others are added.

    Raises:
        InputError: If two would be equal.
    """
    taken: dict[str, str] = {}
    for name in names:
        short = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.").lower()
        if short in ("", WARM_START):
            short = f"{short}-{hashlib.sha256(name.encode()).hexdigest()[:6]}".lstrip("-")
        if short in taken:
            raise InputError(
                f"arms: {taken[short]!r} and {name!r} would share the folder {short!r}, whose name keeps only "
                "lower-case letters, digits, '.', '_' and '-'; rename one of them"
            )
        taken[short] = name
    return {name: short for short, name in taken.items()}


def _run(arm: str | None, part: Part, seed: int, folder: Path, warm_start: StudyRun | None = None) -> StudyRun:
    fields = part.settings()
    where = "warm_start" if arm is None else f"arms: {arm!r}"
    if warm_start is not None and "model_name_or_path" in part.changes:
        raise InputError(f"{where}: model_name_or_path: runs begin with the warm start of the study; remove it")
    if fields.get("save_strategy") in ("no", False, "best"):
        source = where if "save_strategy" in part.changes else part.config
        raise InputError(
            f"{source}: save_strategy: expected 'steps' or 'epoch', since curves are read from the last checkpoint, "
            f"got {fields['save_strategy'] or 'no'!r}"
        )
    for name, value in fields.items():
        try:
            json.dumps(value, sort_keys=True, default=str)
        except (TypeError, ValueError) as error:  # keys of several types, or a mapping that contains itself
            raise InputError(f"{where}: {name}: expected a value that JSON can hold: {error}") from error
    fields = {name: value for name, value in fields.items() if name not in ("output_dir", "seed")}
    begin = {} if warm_start is None else {"model_name_or_path": str(warm_start.folder)}
    identity = {
        "recipe": shown(part.recipe),
        "seed": seed,
        "fields": {name: value for name, value in fields.items() if name not in (*begin, "resume_with_changes")},
        "warm_start": None if warm_start is None else warm_start.identity,
    }
    identity = json.loads(json.dumps(identity, default=str))
    settings = {**fields, **begin, "seed": seed, "output_dir": str(folder)}
    return StudyRun(arm, seed, folder, part.recipe, part.config, settings, identity, warm_start)
