"""All possible tasks: every (task type, object, target, room) that ALFRED's rules allow, split in three."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from epo_trl.envs.alfworld.pddl import BY_TASK_TYPE, TASK_TYPES
from epo_trl.envs.alfworld.rooms import HELD_OUT_ROOMS, LAMP_STANDS, ROOM_TYPES, Room, alfred, fits
from epo_trl.envs.base import EnvError

# Games of each type in a cycle of 23, and the share of each room type: as in the real games.
TYPE_COUNTS = {
    "pick_and_place_simple": 5,
    "look_at_obj_in_light": 2,
    "pick_clean_then_place_in_recep": 4,
    "pick_heat_then_place_in_recep": 3,
    "pick_cool_then_place_in_recep": 4,
    "pick_two_obj_and_place": 5,
}
_SHARES = {  # in the order of ROOM_TYPES
    "pick_and_place_simple": (10, 27, 30, 33),
    "look_at_obj_in_light": (1, 17, 83, 1),
    "pick_clean_then_place_in_recep": (77, 1, 1, 23),
    "pick_two_obj_and_place": (15, 27, 30, 28),
}
ROOM_SHARES = {name: dict(zip(ROOM_TYPES, _SHARES.get(name, (1, 1, 1, 1)), strict=True)) for name in TASK_TYPES}
IID_ONE_IN = 8  # one task spec in eight belongs to the "iid" split, for every seed and filter


@dataclass(frozen=True, slots=True, order=True)
class TaskSpec:
    """The goal of a game; the places of objects are drawn separately."""

    task_type: str  # one of `TASK_TYPES`
    object_kind: str  # class of the object to bring, for example `"SoapBar"`
    target_kind: str  # class of the furniture to bring it to, or `"DeskLamp"`
    room: int  # ALFRED's room number

    @property
    def roles(self) -> dict[str, str]:
        """The kinds by their roles in ALFRED's goals; `""` where the goal has no such role."""
        is_look = self.target_kind == "DeskLamp"
        recep, toggle = ("", self.target_kind) if is_look else (self.target_kind, "")
        return {"obj": self.object_kind, "recep": recep, "toggle": toggle, "mrecep": ""}

    @property
    def split(self) -> str:
        """The split of this task spec: `"train"`, `"iid"` or `"ood"`."""
        if self.room in HELD_OUT_ROOMS:
            return "ood"
        text = f"{self.task_type}-{self.object_kind}-{self.target_kind}-{self.room}"
        return "iid" if hashlib.sha256(text.encode()).digest()[0] % IID_ONE_IN == 0 else "train"


@dataclass(frozen=True, slots=True)
class Filters:
    """A filter of games. `None` means all."""

    task_types: tuple[str, ...] | None = None  # names from `TASK_TYPES`
    # Names from `ROOM_TYPES`: `"kitchens"`, `"livingrooms"`, `"bedrooms"`, `"bathrooms"`.
    room_types: tuple[str, ...] | None = None
    max_receptacles: int | None = None  # maximum number of receptacles in the room

    def __post_init__(self) -> None:
        for field, known in (("task_types", TASK_TYPES), ("room_types", ROOM_TYPES)):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, tuple(value))
                if not value or not set(value) <= set(known):
                    raise EnvError(f"{field}: expected names from {', '.join(known)}, got {value}")
        if self.max_receptacles is not None and self.max_receptacles < 2:
            raise EnvError(f"max_receptacles: expected an integer >= 2, got {self.max_receptacles}")


@cache
def task_specs(split: str, filters: Filters) -> dict[str, dict[str, dict[str, list[TaskSpec]]]]:
    """Returns the sorted task specs of a split by task type, room type and object kind, leaving out empty types.

    Raises:
        EnvError: If no task spec is left, or a requested task type exists in no room of the filters.
    """
    wanted, specs = filters.task_types or TASK_TYPES, _all_specs(filters)
    impossible = set(filters.task_types or ()) - {spec.task_type for spec in specs}
    if impossible:
        raise EnvError(f"task_types: no room of {filters} allows {', '.join(sorted(impossible))}")
    found: dict[str, dict[str, dict[str, list[TaskSpec]]]] = {task_type: {} for task_type in wanted}
    for spec in specs:
        if spec.task_type in found and spec.split == split:
            by_object = found[spec.task_type].setdefault(alfred().rooms[spec.room].room_type, {})
            by_object.setdefault(spec.object_kind, []).append(spec)
    found = {task_type: rooms for task_type, rooms in found.items() if rooms}
    if not found:
        raise EnvError(f"{filters} leaves no game of the split {split!r}; use more rooms or task types")
    return found


@cache
def type_order(task_types: tuple[str, ...]) -> tuple[str, ...]:
    """Returns an order in which each task type occurs `TYPE_COUNTS` times, spread evenly."""
    total = sum(TYPE_COUNTS[name] for name in task_types)
    due = dict.fromkeys(task_types, 0)
    order = []
    for _ in range(total):
        due = {name: credit + TYPE_COUNTS[name] for name, credit in due.items()}
        first = max(due, key=due.__getitem__)
        due[first] -= total
        order.append(first)
    return tuple(order)


@cache
def _all_specs(filters: Filters) -> tuple[TaskSpec, ...]:
    types, limit = filters.room_types or ROOM_TYPES, filters.max_receptacles or float("inf")
    rooms = [r for r in alfred().rooms.values() if r.room_type in types and len(r.receptacles) <= limit]
    return tuple(sorted(spec for room in rooms for spec in _specs_of_room(room)))


def _specs_of_room(room: Room) -> Iterator[TaskSpec]:
    """Yields every task spec that a room allows."""
    for task_type in TASK_TYPES:
        if room.room_type in alfred().goals[task_type].room_types:
            for object_kind in sorted(room.object_kinds & alfred().portable):
                for target in _targets(room, task_type, object_kind):
                    yield TaskSpec(task_type, object_kind, target, room.number)


def _targets(room: Room, task_type: str, object_kind: str) -> list[str]:
    homes = [kind for kind in room.receptacle_kinds if fits(object_kind, kind)]
    if task_type == "look_at_obj_in_light":
        # A floor lamp stands on nothing, and the goal wants the lamp on a receptacle: desk lamps only.
        has_lamp = "DeskLamp" in room.object_kinds and any(kind in LAMP_STANDS for kind in room.receptacle_kinds)
        return ["DeskLamp"] if has_lamp and homes else []
    treatment = BY_TASK_TYPE.get(task_type)
    if treatment:
        able = alfred().able[treatment.ability]
        if treatment.tool not in room.receptacle_kinds or object_kind not in able:
            return []
        return [kind for kind in homes if kind != treatment.tool and len(homes) > 1]
    return [kind for kind in homes if len(homes) > 1]
