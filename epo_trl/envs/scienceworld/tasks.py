"""The fixed task lists: which variations of which task types belong to which split. See `tasks.json` for the result.

Of each type ScienceWorld gives the first half of the variations to training, the next quarter to development and the
rest to test; so "iid" draws from the second part and "ood" from the third, as in the paper. "heldout" draws from the
third part of types that no other split plays.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from epo_trl.envs.base import EnvError
from epo_trl.envs.scienceworld.jvm import Jvm
from epo_trl.envs.scienceworld.world import World

SPLITS = ("train", "iid", "ood", "heldout")
SAMPLING = ("types", "variations")
SIMPLIFICATIONS = ("teleportAction", "selfWateringFlowerPots", "openContainers", "openDoors", "noElectricalAction")
TESTS_PER_TYPE = 10
DRAWN_PER_TYPE = 75  # the committed lists are longer than the default, for runs on few task types
HELD_OUT = (
    "chemistry-mix-paint-tertiary-color",
    "find-plant",
    "freeze",
    "lifespan-longest-lived-then-shortest-lived",
    "test-conductivity-of-unknown-substances",
)
_FILE = Path(__file__).with_name("tasks.json")


def is_circuit_task(task_type: str) -> bool:
    """Whether a task type needs the electrical actions."""
    return "power-component" in task_type or "conductivity" in task_type


def check_simplification(simplification: str, task_types: Sequence[str]) -> None:
    """Raises `EnvError` if a simplification is unknown, or takes away what one of the task types needs."""
    names = simplification.split(",") if simplification else []
    unknown = [name for name in names if name not in SIMPLIFICATIONS and simplification != "easy"]
    if unknown:
        raise EnvError(
            f"simplification: got {', '.join(map(repr, unknown))}, takes 'easy', '' or a list out of "
            f"{', '.join(SIMPLIFICATIONS)}, separated by commas"
        )
    circuits = [task_type for task_type in task_types if is_circuit_task(task_type)]
    if "noElectricalAction" in names and circuits:
        raise EnvError(
            f"simplification: got {simplification!r}, but {circuits[0]!r} needs the electrical actions; "
            "leave circuit tasks out of task_types and heldout_types, or take 'easy', which spares them"
        )


def has_teleport(simplification: str) -> bool:
    """Returns whether a simplification lets an agent teleport."""
    return not {"easy", "teleportAction"}.isdisjoint(simplification.split(","))


def draw_tests(sizes: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, Any]:
    """Returns the content of `tasks.json`: of each type, the number of training variations and the drawn test ones.

    Args:
        sizes: Of each task type, how many variations ScienceWorld has for training, development and test.
        seed: Of the draw.
    """
    content = {}
    for task_type, (train, dev, test) in sizes.items():
        rng = random.Random(f"scienceworld {task_type} {seed}")
        iid = rng.sample(range(train, train + dev), min(dev, DRAWN_PER_TYPE))
        ood = rng.sample(range(train + dev, train + dev + test), min(test, DRAWN_PER_TYPE))
        content[task_type] = {"variations": [train, dev, test], "iid": iid, "ood": ood}
    return content


def engine_sizes(jvm: Jvm) -> dict[str, list[int]]:
    """Returns, of each task type, how many variations the engine has for training, development and test."""
    world, sizes = World(jvm), {}
    for task_type in world.task_types():
        world.load(task_type, 0, "easy")
        parts = world.variations()
        if [variation for part in parts for variation in part] != list(range(sum(map(len, parts)))):
            raise EnvError(f"the variations of {task_type!r} are not contiguous, which the task lists build on")
        sizes[task_type] = [len(part) for part in parts]
    return sizes


@lru_cache(maxsize=1)
def _content() -> dict[str, Any]:
    return json.loads(_FILE.read_text(encoding="utf-8"))


def all_task_types() -> tuple[str, ...]:
    """Returns ScienceWorld's 30 task types, in alphabetical order."""
    return tuple(_content())


@dataclass(frozen=True)
class TaskLists:
    """The task ids of every split, `"<split>/<task type>/<variation>"`, cycling through the task types.

    Args:
        task_types: Types to train and test on; all but the held-out ones if empty.
        heldout_types: Types of the split "heldout". By default five that have near relatives among the rest, less what
            `task_types` asks for; with an empty list there is no such split.
        sampling: `"types"`: every type has equally many training entries, so that drawing uniformly from the list draws
            uniformly over types; where a type has fewer variations they come more often. `"variations"`: every
            variation once.
        tests_per_type: Most tasks of one type in a test list, up to 75; some types have fewer variations.
        n_iid, n_ood, n_heldout: Length of the test lists, cut from what `tests_per_type` gives; the whole if `None`.

    Raises:
        EnvError: If a setting is wrong.
    """

    task_types: tuple[str, ...] = ()
    heldout_types: tuple[str, ...] | None = None
    sampling: str = "types"
    tests_per_type: int = TESTS_PER_TYPE
    n_iid: int | None = None
    n_ood: int | None = None
    n_heldout: int | None = None
    ids: dict[str, tuple[str, ...]] = field(init=False)

    def __post_init__(self) -> None:
        if self.sampling not in SAMPLING:
            raise EnvError(f"sampling: got {self.sampling!r}, takes one of {', '.join(SAMPLING)}")
        if not 1 <= self.tests_per_type <= DRAWN_PER_TYPE:
            raise EnvError(f"tests_per_type: got {self.tests_per_type}, takes 1 to {DRAWN_PER_TYPE}")
        for name, given in (("task_types", self.task_types), ("heldout_types", self.heldout_types or ())):
            unknown = sorted(set(given) - set(_content()))
            if unknown:
                raise EnvError(f"{name}: got {unknown[0]!r}, ScienceWorld has {', '.join(_content())}")
        held_out = self._held_out()
        seen = tuple(name for name in _content() if (name in self.task_types or not self.task_types))
        seen = tuple(name for name in seen if name not in held_out)
        if not seen:
            raise EnvError("heldout_types: got every task type, takes fewer: none is left to train on")
        ids = {
            "train": self._train(seen),
            "iid": self._tests("iid", "iid", seen, self.n_iid),
            "ood": self._tests("ood", "ood", seen, self.n_ood),
            "heldout": self._tests("heldout", "ood", held_out, self.n_heldout),
        }
        object.__setattr__(self, "ids", {split: tasks for split, tasks in ids.items() if tasks})

    @property
    def played_types(self) -> tuple[str, ...]:
        """The task types that occur in some list."""
        return tuple(sorted({task_id.split("/")[1] for tasks in self.ids.values() for task_id in tasks}))

    def find(self, task_id: str) -> tuple[str, int]:
        """Returns the task type and the variation of a task id.

        Raises:
            EnvError: If it has another form, or there is no such variation in that part of ScienceWorld.
        """
        split, _, rest = task_id.partition("/")
        task_type, _, number = rest.partition("/")
        if split not in SPLITS or task_type not in _content() or not number.isdecimal():
            raise EnvError(
                f"task_id: got {task_id!r}, takes '<split>/<task type>/<variation>' with a split out of "
                f"{', '.join(SPLITS)} and a task type out of {', '.join(_content())}"
            )
        first, after = _part(split, task_type)
        if not first <= int(number) < after:
            raise EnvError(
                f"task_id: got {task_id!r}, but the variations of {split}/{task_type} are {first} to {after - 1}"
            )
        return task_type, int(number)

    def _held_out(self) -> tuple[str, ...]:
        if self.heldout_types is None:
            return tuple(name for name in HELD_OUT if name not in self.task_types)
        both = sorted(set(self.heldout_types) & set(self.task_types))
        if both:
            raise EnvError(f"heldout_types: got {both[0]!r}, which is one of task_types as well")
        return tuple(name for name in _content() if name in self.heldout_types)

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

    def _tests(self, split: str, part: str, types: Sequence[str], size: int | None) -> tuple[str, ...]:
        tasks = _interleaved([self._drawn(split, part, name) for name in types])
        if size is None:
            return tasks
        if not 0 <= size <= len(tasks):
            raise EnvError(f"n_{split}: got {size}, takes 0 to {len(tasks)} with these task types")
        return tasks[:size]

    def _drawn(self, split: str, part: str, task_type: str) -> list[str]:
        return [f"{split}/{task_type}/{number}" for number in _content()[task_type][part][: self.tests_per_type]]


def _part(split: str, task_type: str) -> tuple[int, int]:
    """Returns the first variation of a split and the one after the last."""
    train, dev, test = _content()[task_type]["variations"]
    return {"train": (0, train), "iid": (train, train + dev)}.get(split, (train + dev, train + dev + test))


def _interleaved(columns: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(entry for row in zip_longest(*columns) for entry in row if entry is not None)
