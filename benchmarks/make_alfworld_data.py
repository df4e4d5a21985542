"""Writes `epo_trl/envs/alfworld/data` from the installed package `alfworld`: ALFRED's rooms, rules and goals.

    python benchmarks/make_alfworld_data.py

Generated games need nothing else of that package. Run it again for a new version of `alfworld`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from epo_trl.envs.alfworld.pddl import TASK_TYPES
from epo_trl.envs.alfworld.rooms import DATA, thor_id

ROOM_TYPES = {"kitchens": "Kitchen", "livingrooms": "LivingRoom", "bedrooms": "Bedroom", "bathrooms": "Bathroom"}
CAMERA_HEIGHT_METRES = 1.65
TEXTS = ("alfred.pddl", "alfred.twl2")
# Furniture that a room has but its layout file does not place; one of each where not listed.
UNPLACED_COUNTS = {"StoveBurner": 4, "Drawer": 3, "Shelf": 2, "Cabinet": 2}
# Objects that are seen and cannot be taken, on furniture and on the floor.
SHOWN_ONLY = frozenset({"DeskLamp", "HousePlant", "PaperTowelRoll", "TeddyBear", "Television"})
ON_THE_FLOOR = frozenset({"BaseballBat", "BasketBall", "Plunger", "TennisRacket", "WateringCan"})

Stand = tuple[int, int]  # x and z in steps of 0.25 m
Point = tuple[float, float, float]  # x, height, z in metres


def package_folder() -> Path:
    """Returns the folder of the package `alfworld` without importing it, which would create a folder for games."""
    spec = importlib.util.find_spec("alfworld")
    if spec is None or spec.origin is None:
        raise SystemExit("alfworld: expected the installed package, got none; pip install 'epo-trl[alfworld]'")
    return Path(spec.origin).parent


def load_module(name: str) -> ModuleType:
    """Loads a module of `alfworld.gen` that only holds tables."""
    spec = importlib.util.spec_from_file_location(f"_alfworld_{name}", package_folder() / "gen" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Tables:
    """ALFWorld's tables of kinds, and the rooms built from its layout files."""

    def __init__(self) -> None:
        self.constants = load_module("constants")
        self.goals = load_module("goal_library").gdict
        self.furniture = set(self.constants.RECEPTACLES) - set(self.constants.MOVABLE_RECEPTACLES)
        may_hold = self.constants.VAL_RECEPTACLE_OBJECTS
        lying = {kind for furniture in self.furniture for kind in may_hold.get(furniture, ())}
        self.portable = (lying & self.constants.OBJECTS_SET) - self.furniture - ON_THE_FLOOR

    def as_json(self) -> dict[str, Any]:
        """Returns the content of `alfred.json`."""
        constants = self.constants
        room_types = {alfred: ours for ours, alfred in ROOM_TYPES.items()}
        return {
            "furniture": sorted(self.furniture),
            "objects": sorted(constants.OBJECTS_SET),
            "portable": sorted(self.portable),
            "openable": sorted(constants.OPENABLE_CLASS_SET),
            "movable_receptacles": sorted(constants.MOVABLE_RECEPTACLES_SET),
            "may_hold": {name: sorted(kinds) for name, kinds in sorted(constants.VAL_RECEPTACLE_OBJECTS.items())},
            "able": {name: sorted(kinds) for name, kinds in sorted(constants.VAL_ACTION_OBJECTS.items())},
            "max_count": constants.MAX_NUM_OF_OBJ_INSTANCES,
            "goals": {
                task_type: {
                    **self.goals[task_type],
                    "room_types": sorted(room_types[name] for name in constants.GOALS_VALID[task_type]),
                }
                for task_type in TASK_TYPES
            },
            "rooms": {
                str(number): self.room(number, ours)
                for ours, alfred in ROOM_TYPES.items()
                for number in constants.SCENE_TYPE[alfred]
            },
        }

    def room(self, number: int, room_type: str) -> dict[str, Any]:
        """Returns a room by its ALFRED number as fields of `Room`."""
        stem = package_folder() / "gen" / "layouts" / f"FloorPlan{number}"
        kinds = set(json.loads(Path(f"{stem}-objects.json").read_text()))
        floor = [(round(x * 4), round(z * 4)) for x, z in np.load(f"{stem}-layout.npy").tolist()]
        placed = json.loads(Path(f"{stem}-openable.json").read_text())
        receptacles = []
        for identifier, (x, z, rotation, _) in sorted(placed.items()):
            parts = identifier.split("|")
            kind = parts[4] if len(parts) > 4 else parts[0]
            if kind in self.furniture:
                position = (float(parts[1]), float(parts[2]), float(parts[3]))
                stand = (round(x * 4), round(z * 4))
                location = (*stand, round(rotation / 90), self.tilt(position, kind, stand, number))
                receptacles.append((identifier, kind, position, location))
        missing = (kinds & self.furniture) - {kind for _, kind, _, _ in receptacles}
        receptacles += self.place_missing(sorted(missing), floor, number)
        return {
            "room_type": room_type,
            "receptacles": sorted(receptacles),
            "object_kinds": sorted((kinds & self.portable) | (kinds & SHOWN_ONLY)),
            "floor": floor,
        }

    def tilt(self, position: Point, kind: str, stand: Stand, number: int) -> int:
        """Returns the camera tilt in degrees, a multiple of 15, from a floor point towards an object."""
        forced = self.constants.FORCED_HORIZON_OBJS
        for key in ((kind, number), (kind, None)):
            if key in forced:
                return int(forced[key])
        distance = max(abs(position[0] - stand[0] / 4), abs(position[2] - stand[1] / 4))
        angle = math.degrees(math.atan2(CAMERA_HEIGHT_METRES - position[1], distance))
        return max(-30, min(60, round(angle / 15) * 15))

    def place_missing(self, kinds: list[str], floor: list[Stand], number: int) -> list[tuple[Any, ...]]:
        """Places furniture at made-up points beside the floor, the same in every game of the room."""
        rng = random.Random(f"furniture of room {number}")
        receptacles = []
        for kind in kinds:
            for _ in range(UNPLACED_COUNTS.get(kind, 1)):
                stand = rng.choice(floor)
                rotation = rng.randrange(4)
                step = ((0, 0.6), (0.6, 0), (0, -0.6), (-0.6, 0))[rotation]
                x = stand[0] / 4 + step[0] + rng.uniform(-0.1, 0.1)
                z = stand[1] / 4 + step[1] + rng.uniform(-0.1, 0.1)
                position = (round(x, 2), rng.choice((0.02, 0.9, 0.93)), round(z, 2))
                location = (*stand, rotation, self.tilt(position, kind, stand, number))
                receptacles.append((thor_id(kind, position), kind, position, location))
        return receptacles


def files() -> dict[str, str]:
    """Returns the texts to ship, by file name."""
    texts = {name: (package_folder() / "data" / name).read_text(encoding="utf-8") for name in TEXTS}
    return {**texts, "alfred.json": json.dumps(Tables().as_json(), separators=(",", ":")) + "\n"}


if __name__ == "__main__":
    for name, text in files().items():
        (DATA / name).write_text(text, encoding="utf-8")
