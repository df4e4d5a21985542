"""ALFWorld-style games, generated offline from ALFRED's rooms, rules and goals.

Scores on generated games are not comparable with published ALFWorld numbers: rooms and rules are ALFWorld's, but the
objects and their places are drawn by this generator, with similar shares and numbers (see docs/alfworld.md).
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from epo_trl.envs.alfworld.game_files import DESCRIPTION_FILE, GAME_FILE, SPLIT_FOLDERS, Game
from epo_trl.envs.alfworld.rooms import DATA, LAMP_STANDS, Location, Receptacle, Room, alfred, fits, thor_id
from epo_trl.envs.alfworld.task_specs import ROOM_SHARES, Filters, TaskSpec, task_specs, type_order
from epo_trl.envs.base import EnvError

SET_FILE = "generated.json"  # beside the games of `write_games`: the arguments they were made from
_ATTEMPTS = 100

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


@dataclass(frozen=True, slots=True)
class GeneratedGame:
    """A generated game with its task and the name of its folder on disk."""

    game: Game
    spec: TaskSpec
    trial: str

    @property
    def folder(self) -> str:
        """Path below the split folder, in ALFWorld's layout."""
        r = self.spec
        return f"{r.task_type}-{r.object_kind}-None-{r.target_kind}-{r.room}/{self.trial}"

    def trajectory(self) -> dict[str, Any]:
        """Builds the part of `traj_data.json` that `AlfredTWEnv` reads."""
        names = {"obj": "object", "recep": "parent", "toggle": "toggle", "mrecep": "mrecep"}
        targets = {f"{names[role]}_target": kind for role, kind in self.spec.roles.items()}
        return {
            "task_id": self.trial,
            "task_type": self.spec.task_type,
            "pddl_params": {**targets, "object_sliced": False},
            "scene": {"floor_plan": f"FloorPlan{self.spec.room}", "scene_num": self.spec.room},
            "turk_annotations": {"anns": [{"task_desc": self.game.task}]},
        }


def generate(split: str, index: int, seed: int, filters: Filters | None = None) -> GeneratedGame:
    """Generates game number `index` of a split: the same text for the same arguments, in every process.

    Task types rotate in the shares of `TYPE_COUNTS`. Then a room type is drawn with the shares of `ROOM_SHARES`, and in
    it the object, the target, the room and the places of all objects. A split has any number of games;
    "iid" has tasks that "train" never has, "ood" held-out rooms.
    """
    choices = task_specs(split, filters or Filters())
    order = type_order(tuple(choices))
    task_type = order[index % len(order)]
    by_room = choices[task_type]
    shares = [ROOM_SHARES[task_type][room_type] for room_type in by_room]
    rng = random.Random(f"alfworld/{seed}/{split}/{index}")
    for _ in range(_ATTEMPTS):
        by_object = by_room[rng.choices(list(by_room), shares)[0]]
        spec = rng.choice(by_object[rng.choice(list(by_object))])
        room = alfred().rooms[spec.room]
        items = _place_all(rng, room, spec)
        if items is not None:
            break
    else:
        raise EnvError(f"no room for the objects of game {split}/{index} in {_ATTEMPTS} attempts; widen the filters")
    trial = f"trial_T{rng.getrandbits(48):012x}"
    problem = _problem(rng, room, spec, items, trial)
    domain, grammar = _rules()
    template = rng.choice(alfred().goals[spec.task_type].templates)
    task = template.format(**{role: kind.lower() for role, kind in spec.roles.items()})
    game = Game(f"{split}/{index}", problem, domain, grammar.replace("UNKNOWN GOAL", task))
    return GeneratedGame(game, spec, trial)


def _place_all(rng: random.Random, room: Room, spec: TaskSpec) -> list[Item] | None:
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


@cache
def _rules() -> tuple[str, str]:
    """Loads ALFWorld's PDDL domain and its text grammar."""
    return (DATA / "alfred.pddl").read_text(encoding="utf-8"), (DATA / "alfred.twl2").read_text(encoding="utf-8")


def _problem(rng: random.Random, room: Room, spec: TaskSpec, items: list[Item], trial: str) -> str:
    """Builds the PDDL problem of a game."""
    stands = {receptacle.location for receptacle in room.receptacles}
    start = (*rng.choice(room.floor), rng.randrange(4), 30)
    while start in stands:  # otherwise the game would not begin in the middle of the room
        start = (*rng.choice(room.floor), rng.randrange(4), 30)
    objects = ["agent1 - agent"]
    objects += [f"{kind}Type - otype" for kind in sorted(alfred().objects - alfred().furniture)]
    objects += [f"{kind}Type - rtype" for kind in sorted(alfred().furniture)]
    objects += [f"{_mangle(item.identifier)} - object" for item in items]
    objects += [f"{_mangle(receptacle.identifier)} - receptacle" for receptacle in room.receptacles]
    objects += [f"{_place_name(location)} - location" for location in sorted(stands | {start})]
    facts = [*_room_facts(room, items), f"(atLocation agent1 {_place_name(start)})", *_item_facts(spec, items)]
    goal = alfred().goals[spec.task_type].pddl.format(**spec.roles)
    lines = [f"(define (problem plan_{trial})", "(:domain alfred)", "(:objects", *objects, ")", "(:init", *facts, ")"]
    return "\n".join(lines) + "\n" + goal.replace("#", "-")  # the goal text also closes the problem


def _room_facts(room: Room, items: list[Item]) -> list[str]:
    facts = []
    for receptacle in room.receptacles:
        name = _mangle(receptacle.identifier)
        facts.append(f"(receptacleType {name} {receptacle.kind}Type)")
        facts.append(f"(receptacleAtLocation {name} {_place_name(receptacle.location)})")
        if receptacle.kind in alfred().openable:
            facts.append(f"(openable {name})")
    present = sorted({item.kind for item in items})
    facts += [f"(canContain {r}Type {o}Type)" for r in room.receptacle_kinds for o in present if fits(o, r)]
    return facts


def _item_facts(spec: TaskSpec, items: list[Item]) -> list[str]:
    able = alfred().able
    facts = []
    for item in items:
        name = _mangle(item.identifier)
        facts.append(f"(objectType {name} {item.kind}Type)")
        facts.append(f"(inReceptacle {name} {_mangle(item.receptacle.identifier)})")
        facts.append(f"(objectAtLocation {name} {_place_name(item.receptacle.location)})")
        facts += [
            f"({ability.lower()} {name})"
            for ability in ("Cleanable", "Heatable", "Coolable", "Toggleable", "Sliceable")
            if item.kind in able[ability]
        ]
        if item.kind in alfred().portable:
            facts.append(f"(pickupable {name})")
        if item.kind in alfred().movable_receptacles:
            facts.append(f"(isReceptacleObject {name})")
        if item.kind == spec.object_kind and item.receptacle.kind == "Fridge":
            facts.append(f"(isCool {name})")  # as in ALFRED: objects in the fridge are cold
    return facts


_MANGLED = str.maketrans({"-": "_minus_", "|": "_bar_", "+": "_plus_", ".": "_dot_", ",": "_comma_"})


def _mangle(identifier: str) -> str:
    return identifier.translate(_MANGLED)


def _place_name(location: Location) -> str:
    return _mangle("loc|{}|{}|{}|{}".format(*location))


def write_games(
    out: str | os.PathLike[str], n_train: int, n_iid: int, n_ood: int, seed: int = 0, filters: Filters | None = None
) -> int:
    """Writes games in ALFWorld's folder layout and returns their number.

    Existing games are kept: repeating the call completes an interrupted one. The folder `out`, in which it creates
    `json_2.1.1/{train,valid_seen,valid_unseen}`, is usable as `$ALFWORLD_DATA`.

    Raises:
        EnvError: If the filter leaves no game, or the folder holds other games.
    """
    from tqdm import tqdm

    chosen = filters or Filters()
    numbers = {"train": n_train, "iid": n_iid, "ood": n_ood}
    _keep_apart(Path(out), {"seed": seed, **asdict(chosen)})
    todo = [(split, i) for split, n in numbers.items() for i in range(n)]
    for split, index in tqdm(todo, desc="ALFWorld games", unit="game"):
        generated = generate(split, index, seed, chosen)
        folder = Path(out) / "json_2.1.1" / SPLIT_FOLDERS[split] / generated.folder
        if (folder / GAME_FILE).is_file():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DESCRIPTION_FILE).write_text(json.dumps(generated.trajectory(), indent=1))
        (folder / "initial_state.pddl").write_text(generated.game.problem)
        _write_whole(folder / GAME_FILE, generated.game.as_json())  # the last one: with it the game is complete
    return len(todo)


def _keep_apart(out: Path, made_from: dict[str, Any]) -> None:
    """Refuses a folder with games of other arguments, which would mix train and test lists."""
    file, text = out / SET_FILE, json.dumps({"from": made_from})
    there = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    has_others = there["from"] != json.loads(text)["from"] if there else any((out / "json_2.1.1").glob("*/*"))
    if has_others:
        raise EnvError(
            f"out: expected a folder without other games, got {out} with those made from {json.dumps(there)}, not "
            f"{text}; choose another folder, or use the same settings"
        )
    out.mkdir(parents=True, exist_ok=True)
    _write_whole(file, text)


def _write_whole(file: Path, text: str) -> None:
    """Writes a file that is complete or absent, also after a kill."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)
