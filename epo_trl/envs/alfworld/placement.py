"""Placement of objects in a generated room: how many of each kind, and on which furniture."""

from __future__ import annotations

import random
from dataclasses import dataclass

from epo_trl.envs.alfworld.rooms import LAMP_STANDS, Receptacle, Room, alfred, fits, thor_id
from epo_trl.envs.alfworld.task_specs import TaskSpec

# These numbers bring averages close to those of the real games: benchmarks/compare_alfworld_games.py.
_CAPACITY = {
    **dict.fromkeys(("StoveBurner", "CoffeeMachine", "Toaster"), 1),
    **dict.fromkeys(("TowelHolder", "HandTowelHolder", "ToiletPaperHanger"), 1),
    **{"GarbageCan": 2, "Drawer": 3, "Cabinet": 3, "Microwave": 3},
    **{"BathtubBasin": 4, "SinkBasin": 5, "Shelf": 5, "Toilet": 5, "Fridge": 9},
}
_DEFAULT_CAPACITY = 16
_WEIGHTS = {  # weight of a kind of furniture among those that may hold an object; 1 where not listed
    **{"CounterTop": 1.6, "DiningTable": 1.9, "Desk": 1.4, "CoffeeTable": 1.7, "BathtubBasin": 2.0, "Bed": 1.4},
    **{"StoveBurner": 3.0, "HandTowelHolder": 8.0, "Drawer": 0.6},
    **{"Fridge": 0.8, "Microwave": 0.3, "SinkBasin": 0.35, "GarbageCan": 0.25, "SideTable": 0.7, "Shelf": 0.8},
    **{"ArmChair": 0.35, "Ottoman": 0.4, "LaundryHamper": 0.1, "ToiletPaperHanger": 0.3, "Safe": 0.4},
}
_FEW = ("Box", "Laptop", "Pillow")  # one or two of them; up to three of other kinds
# Objects that a room has once, on furniture of these kinds.
_STANDS = {
    "DeskLamp": LAMP_STANDS,
    "HousePlant": ("CounterTop", "SideTable", "DiningTable", "Shelf", "CoffeeTable", "Dresser", "Desk"),
    "PaperTowelRoll": ("CounterTop", "DiningTable", "Shelf", "Toilet"),
    "TeddyBear": ("Bed",),
    "Television": ("TVStand", "Dresser", "CoffeeTable", "SideTable"),
}


@dataclass(frozen=True, slots=True)
class Item:
    """An object in or on a receptacle."""

    identifier: str
    kind: str
    receptacle: Receptacle


def place_all(rng: random.Random, room: Room, spec: TaskSpec) -> list[Item] | None:
    """Places all objects, or returns `None` if the objects of the task do not fit."""
    items: list[Item] = []
    needed = 2 if spec.task_type == "pick_two_obj_and_place" else 1
    # None of them may be at the target, or the game could be won at the start.
    wanted = max(needed, _how_many(rng, spec.object_kind))
    if _place(rng, room, spec.object_kind, wanted, items, banned=spec.target_kind) < needed:
        return None
    for kind, stands in _STANDS.items():
        free = [receptacle for receptacle in room.receptacles if receptacle.kind in stands]
        if kind in room.object_kinds and free:
            items.append(_new_item(rng, kind, rng.choice(free), items))
    for kind in sorted(room.object_kinds & alfred().portable - {spec.object_kind}):
        _place(rng, room, kind, _how_many(rng, kind), items)
    return items


def _how_many(rng: random.Random, kind: str) -> int:
    return rng.randint(1, 2 if kind in _FEW else alfred().max_count)


def _place(rng: random.Random, room: Room, kind: str, count: int, items: list[Item], banned: str = "") -> int:
    """Adds up to `count` objects of a kind to `items` and returns the number that found a place."""
    for done in range(count):
        used = [item.receptacle for item in items]
        free = [
            receptacle
            for receptacle in room.receptacles
            if receptacle.kind != banned
            and fits(kind, receptacle.kind)
            and used.count(receptacle) < _CAPACITY.get(receptacle.kind, _DEFAULT_CAPACITY)
        ]
        if not free:
            return done
        # Draw the kind of furniture first, or twenty cabinets would outweigh one table.
        kinds = sorted({receptacle.kind for receptacle in free})
        chosen = rng.choices(kinds, [_WEIGHTS.get(name, 1.0) for name in kinds])[0]
        receptacle = rng.choice([receptacle for receptacle in free if receptacle.kind == chosen])
        items.append(_new_item(rng, kind, receptacle, items))
    return count


def _new_item(rng: random.Random, kind: str, receptacle: Receptacle, items: list[Item]) -> Item:
    taken = {item.identifier for item in items}
    x, height, z = receptacle.position
    while True:
        spot = (x + rng.uniform(-0.4, 0.4), height + rng.uniform(0.0, 0.2), z + rng.uniform(-0.4, 0.4))
        identifier = thor_id(kind, spot)
        if identifier not in taken:
            return Item(identifier, kind, receptacle)
