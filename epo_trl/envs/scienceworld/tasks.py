"""The fixed task lists: the task types and variations of each split.

`benchmarks/make_scienceworld_tasks.py` draws the test variations and writes `tasks.json`.

ScienceWorld assigns the first half of each type's variations to training, the next quarter to development and the rest
to test. "iid" draws from the second part and "ood" from the third, as in the paper. "heldout" draws from the third part
of types that no other split uses.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

from epo_trl.bounds import OneOf, Range, check_bounds, option
from epo_trl.envs.base import EnvError, read_number

SPLITS = ("train", "iid", "ood", "heldout")
DRAWN_PER_TYPE = 75  # the committed lists are longer than the default, for runs on few task types
HELD_OUT = (
    "chemistry-mix-paint-tertiary-color",
    "find-plant",
    "freeze",
    "lifespan-longest-lived-then-shortest-lived",
    "test-conductivity-of-unknown-substances",
)
FILE = Path(__file__).with_name("tasks.json")


@lru_cache(maxsize=1)
def _content() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def all_task_types() -> tuple[str, ...]:
    """Returns ScienceWorld's 30 task types, in alphabetical order."""
    return tuple(_content())


def find_task(task_id: str) -> tuple[str, int]:
    """Parses the task type and the variation from a task id.

    Raises:
        EnvError: If it is malformed, or that part of ScienceWorld has no such variation.
    """
    split, _, rest = task_id.partition("/")
    task_type, _, text = rest.partition("/")
    number = read_number(text)
    if split not in SPLITS or task_type not in _content() or number < 0:
        raise EnvError(
            f"task_id: expected '<split>/<task type>/<variation>' with a split from {', '.join(SPLITS)} and a task "
            f"type from {', '.join(_content())}, got {task_id!r:.100}"
        )
    first, after = _part(split, task_type)
    if not first <= number < after:
        raise EnvError(
            f"task_id: expected a variation of {split}/{task_type} from {first} to {after - 1}, got {task_id!r}"
        )
    return task_type, number


@dataclass
class TaskLists:
    """Tasks of ScienceWorld.

    Task ids are `"<split>/<task type>/<variation>"`; the lists cycle through the task types. By default the split
    "heldout" has five types with close relatives among the rest, without those in `task_types`. With `sampling: types`
    every type has equally many training entries, so a uniform draw from the list is uniform over types; the variations
    of types with fewer variations are repeated. The lengths `n_iid` and `n_ood` cut the lists that `tests_per_type`
    gives. `ids` has the task ids by split.
    """

    task_types: list[str] | None = option(
        None, "Task types to train and test on; all but the held-out ones by default."
    )
    heldout_types: list[str] | None = option(
        None, "Task types of the split 'heldout' only; five by default, none with an empty list."
    )
    sampling: Annotated[str, OneOf(("types", "variations"))] = option(
        "types", "'types': training draws all task types equally often; 'variations': all variations."
    )
    tests_per_type: Annotated[int, Range(least=1, most=DRAWN_PER_TYPE)] = option(
        10, "Maximum number of tasks per type in a test list; some have fewer."
    )
    n_iid: int | None = option(None, "Number of test tasks; by default tests_per_type of each task type.")
    n_ood: int | None = option(None, "Like n_iid, for unseen variations.")

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in ("task_types", "heldout_types"):
            unknown = sorted(set(getattr(self, name) or ()) - set(_content()))
            if unknown:
                raise EnvError(f"{name}: expected names from {', '.join(_content())}, got {unknown[0]!r}")
        held_out = self._held_out()
        seen = [name for name in _content() if name in (self.task_types or _content()) and name not in held_out]
        ids = {
            "train": self._train(seen),
            "iid": self._tests("iid", "iid", seen, self.n_iid),
            "ood": self._tests("ood", "ood", seen, self.n_ood),
            "heldout": self._tests("heldout", "ood", held_out),
        }
        self.ids = {split: tasks for split, tasks in ids.items() if tasks}

    def _held_out(self) -> list[str]:
        trained = self.task_types or ()
        if self.heldout_types is None:
            return [name for name in HELD_OUT if name not in trained]
        both = sorted(set(self.heldout_types) & set(trained))
        if both:
            raise EnvError(f"heldout_types: expected types that are not in task_types, got {both[0]!r}")
        return [name for name in _content() if name in self.heldout_types]

    def _train(self, types: Sequence[str]) -> tuple[str, ...]:
        columns = []
        for task_type in types:
            variations = list(range(*_part("train", task_type)))
            random.Random(f"scienceworld train {task_type}").shuffle(variations)
            columns.append([f"train/{task_type}/{variation}" for variation in variations])
        if self.sampling == "types":
            longest = max(map(len, columns))
            columns = [[column[i % len(column)] for i in range(longest)] for column in columns]
        return _interleaved(columns)

    def _tests(self, split: str, part: str, types: Sequence[str], size: int | None = None) -> tuple[str, ...]:
        numbers = {name: _content()[name][part][: self.tests_per_type] for name in types}
        tasks = _interleaved([[f"{split}/{name}/{number}" for number in numbers[name]] for name in types])
        if size is None:
            return tasks
        if not 0 <= size <= len(tasks):
            raise EnvError(f"n_{split}: expected an integer from 0 to {len(tasks)} with these task types, got {size}")
        return tasks[:size]


def _part(split: str, task_type: str) -> tuple[int, int]:
    """Returns the first variation of a split and the one after the last."""
    train, dev, test = _content()[task_type]["variations"]
    return {"train": (0, train), "iid": (train, train + dev)}.get(split, (train + dev, train + dev + test))


def _interleaved(columns: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(entry for row in zip_longest(*columns) for entry in row if entry is not None)
