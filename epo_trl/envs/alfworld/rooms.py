"""The 120 rooms of ALFRED: positions of the furniture, objects that belong there, and possible tasks.

Everything is read from the data files of the `alfworld` package, without importing it (an import would create a cache
folder) and without its games.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from epo_trl.envs.base import EnvError

ROOM_TYPES = {"kitchens": "Kitchen", "livingrooms": "LivingRoom", "bedrooms": "Bedroom", "bathrooms": "Bathroom"}
HELD_OUT_ROOMS = frozenset({10, 219, 308, 424})  # ALFRED's valid_unseen rooms
CAMERA_HEIGHT_METRES = 1.65
LAMP_STANDS = ("Desk", "SideTable", "Dresser", "Shelf", "DiningTable", "CoffeeTable", "TVStand")
# Furniture that a room has but its layout file does not place; one of each where not listed.
_UNPLACED_COUNTS = {"StoveBurner": 4, "Drawer": 3, "Shelf": 2, "Cabinet": 2}
# Objects on the floor, where the agent cannot take them.
_ON_THE_FLOOR = frozenset({"BaseballBat", "BasketBall", "Plunger", "TennisRacket", "WateringCan"})
SHOWN_ONLY = frozenset({"DeskLamp", "HousePlant", "PaperTowelRoll", "TeddyBear", "Television"})

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


@cache
def package_folder() -> Path:
    """Returns the folder of the installed `alfworld` package.

    Raises:
        EnvError: If it is not installed.
    """
    spec = importlib.util.find_spec("alfworld")
    if spec is None or spec.origin is None:
        raise EnvError("the ALFWorld games need the package 'alfworld': pip install 'epo-trl[alfworld]'")
    return Path(spec.origin).parent


@cache
def constants() -> ModuleType:
    """Loads ALFWorld's constants: which objects belong where, which can be heated, which goals fit which room."""
    return _load_module("constants")


@cache
def goal_library() -> dict[str, dict[str, Any]]:
    """Loads ALFWorld's goals by task type: `"pddl"` and `"templates"` of the task sentence."""
    return _load_module("goal_library").gdict


def _load_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_alfworld_{name}", package_folder() / "gen" / f"{name}.py")
    if spec is None or spec.loader is None:
        raise EnvError(f"the package 'alfworld' has no gen/{name}.py; install alfworld>=0.4.2")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def furniture_kinds() -> frozenset[str]:
    """Returns the receptacle classes that cannot be moved."""
    return frozenset(constants().RECEPTACLES) - frozenset(constants().MOVABLE_RECEPTACLES)


@cache
def portable_kinds() -> frozenset[str]:
    """Returns the object classes that an agent can pick up."""
    may_lie_on = constants().VAL_RECEPTACLE_OBJECTS
    lying = {kind for furniture in furniture_kinds() for kind in may_lie_on.get(furniture, ())}
    return frozenset(lying & constants().OBJECTS_SET) - furniture_kinds() - _ON_THE_FLOOR


def fits(object_kind: str, receptacle_kind: str) -> bool:
    """Whether objects of a class may be in or on furniture of a class."""
    return object_kind in constants().VAL_RECEPTACLE_OBJECTS.get(receptacle_kind, ())


def room_numbers(room_type: str) -> range:
    """Returns the numbers of the 30 rooms of a type of `ROOM_TYPES`."""
    return constants().SCENE_TYPE[ROOM_TYPES[room_type]]


@cache
def load_room(number: int) -> Room:
    """Loads a room by its ALFRED number, for example 301. The same in every process."""
    import numpy as np

    stem = package_folder() / "gen" / "layouts" / f"FloorPlan{number}"
    kinds = set(json.loads(Path(f"{stem}-objects.json").read_text()))
    floor = tuple((round(x * 4), round(z * 4)) for x, z in np.load(f"{stem}-layout.npy").tolist())
    placed = json.loads(Path(f"{stem}-openable.json").read_text())
    receptacles = []
    for identifier, (x, z, rotation, _) in sorted(placed.items()):
        parts = identifier.split("|")
        kind = parts[4] if len(parts) > 4 else parts[0]
        if kind in furniture_kinds():
            position = (float(parts[1]), float(parts[2]), float(parts[3]))
            stand = (round(x * 4), round(z * 4))
            location = (*stand, round(rotation / 90), _tilt(position, kind, stand, number))
            receptacles.append(Receptacle(identifier, kind, position, location))
    missing = (kinds & furniture_kinds()) - {receptacle.kind for receptacle in receptacles}
    receptacles += _place_missing(sorted(missing), floor, number)
    return Room(
        number=number,
        room_type=next(name for name in ROOM_TYPES if number in room_numbers(name)),
        receptacles=tuple(sorted(receptacles, key=lambda receptacle: receptacle.identifier)),
        object_kinds=frozenset(kinds & portable_kinds()) | (kinds & SHOWN_ONLY),
        floor=floor,
    )


def thor_id(kind: str, position: Point) -> str:
    """Formats the THOR id of an object, for example `"Mug|-00.21|+00.76|-01.94"`."""
    x, height, z = position
    if kind.endswith("Basin"):
        return f"{kind.removesuffix('Basin')}|{x:+06.2f}|{height:+06.2f}|{z:+06.2f}|{kind}"
    return f"{kind}|{x:+06.2f}|{height:+06.2f}|{z:+06.2f}"


def _tilt(position: Point, kind: str, stand: tuple[int, int], number: int) -> int:
    """Computes the camera tilt in degrees, a multiple of 15, from a floor point towards an object."""
    forced = constants().FORCED_HORIZON_OBJS
    for key in ((kind, number), (kind, None)):
        if key in forced:
            return forced[key]
    distance = max(abs(position[0] - stand[0] / 4), abs(position[2] - stand[1] / 4))
    angle = math.degrees(math.atan2(CAMERA_HEIGHT_METRES - position[1], distance))
    return max(-30, min(60, round(angle / 15) * 15))


def _place_missing(kinds: list[str], floor: tuple[tuple[int, int], ...], number: int) -> list[Receptacle]:
    """Places furniture at made-up points beside the floor, the same in every game of the room."""
    rng = random.Random(f"furniture of room {number}")
    receptacles = []
    for kind in kinds:
        for _ in range(_UNPLACED_COUNTS.get(kind, 1)):
            stand = rng.choice(floor)
            rotation = rng.randrange(4)
            step = ((0, 0.6), (0.6, 0), (0, -0.6), (-0.6, 0))[rotation]
            x = stand[0] / 4 + step[0] + rng.uniform(-0.1, 0.1)
            z = stand[1] / 4 + step[1] + rng.uniform(-0.1, 0.1)
            position = (round(x, 2), rng.choice((0.02, 0.9, 0.93)), round(z, 2))
            location = (*stand, rotation, _tilt(position, kind, stand, number))
            receptacles.append(Receptacle(thor_id(kind, position), kind, position, location))
    return receptacles
