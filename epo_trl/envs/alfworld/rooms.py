"""The 120 rooms of ALFRED: positions of the furniture, objects that belong there, and possible tasks.

Everything is read from `data/`, which holds what generated games need of the package `alfworld`;
`benchmarks/make_alfworld_data.py` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("data")
ROOM_TYPES = ("kitchens", "livingrooms", "bedrooms", "bathrooms")
HELD_OUT_ROOMS = frozenset({10, 219, 308, 424})  # ALFRED's valid_unseen rooms
LAMP_STANDS = ("Desk", "SideTable", "Dresser", "Shelf", "DiningTable", "CoffeeTable", "TVStand")

Location = tuple[int, int, int, int]  # x and z in steps of 0.25 m, rotation in quarter turns, camera tilt in degrees
Point = tuple[float, float, float]  # x, height, z in metres


@dataclass(frozen=True, slots=True)
class Receptacle:
    """A piece of furniture. `identifier` is its THOR id; at `location` the agent stands to use it."""

    identifier: str
    kind: str
    position: Point
    location: Location


@dataclass(frozen=True)
class Room:
    """One room. `object_kinds` are the classes of objects on its furniture; `floor` are the points to stand on."""

    number: int
    room_type: str
    receptacles: tuple[Receptacle, ...]
    object_kinds: frozenset[str]
    floor: tuple[tuple[int, int], ...]

    @property
    def receptacle_kinds(self) -> tuple[str, ...]:
        """The kinds of furniture in the room, sorted."""
        return tuple(sorted({receptacle.kind for receptacle in self.receptacles}))


@dataclass(frozen=True)
class GoalText:
    """The goal of a task type: its PDDL, templates of the task sentence, and the types of rooms that fit."""

    pddl: str
    templates: tuple[str, ...]
    room_types: frozenset[str]


@dataclass(frozen=True)
class Alfred:
    """ALFRED's tables."""

    furniture: frozenset[str]  # kinds of receptacles that cannot be moved
    objects: frozenset[str]  # all kinds of objects
    portable: frozenset[str]  # kinds of objects that an agent can pick up
    openable: frozenset[str]  # kinds of furniture that can be opened
    movable_receptacles: frozenset[str]  # kinds of objects that hold others
    may_hold: Mapping[str, frozenset[str]]  # kinds of objects by the kind of furniture that they may be in or on
    able: Mapping[str, frozenset[str]]  # kinds of objects by what can be done to them, such as `"Heatable"`
    max_count: int  # largest number of objects of a kind in a room
    goals: Mapping[str, GoalText]  # by task type
    rooms: Mapping[int, Room]  # by number


@cache
def alfred() -> Alfred:
    """Loads the tables."""
    raw = json.loads((DATA / "alfred.json").read_text(encoding="utf-8"))
    kinds = ("furniture", "objects", "portable", "openable", "movable_receptacles")
    return Alfred(
        **{name: frozenset(raw[name]) for name in kinds},
        may_hold={name: frozenset(kinds) for name, kinds in raw["may_hold"].items()},
        able={name: frozenset(kinds) for name, kinds in raw["able"].items()},
        max_count=raw["max_count"],
        goals={
            name: GoalText(goal["pddl"], tuple(goal["templates"]), frozenset(goal["room_types"]))
            for name, goal in raw["goals"].items()
        },
        rooms={int(number): _room(int(number), room) for number, room in raw["rooms"].items()},
    )


def _room(number: int, raw: dict[str, Any]) -> Room:
    return Room(
        number=number,
        room_type=raw["room_type"],
        receptacles=tuple(
            Receptacle(identifier, kind, (x, height, z), (i, j, rotation, tilt))
            for identifier, kind, (x, height, z), (i, j, rotation, tilt) in raw["receptacles"]
        ),
        object_kinds=frozenset(raw["object_kinds"]),
        floor=tuple((x, z) for x, z in raw["floor"]),
    )


def fits(object_kind: str, receptacle_kind: str) -> bool:
    """Whether objects of a class may be in or on furniture of a class."""
    return object_kind in alfred().may_hold.get(receptacle_kind, ())


def thor_id(kind: str, position: Point) -> str:
    """Formats the THOR id of an object, for example `"Mug|-00.21|+00.76|-01.94"`."""
    x, height, z = position
    if kind.endswith("Basin"):
        return f"{kind.removesuffix('Basin')}|{x:+06.2f}|{height:+06.2f}|{z:+06.2f}|{kind}"
    return f"{kind}|{x:+06.2f}|{height:+06.2f}|{z:+06.2f}"
