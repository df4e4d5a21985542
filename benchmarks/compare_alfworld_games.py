"""Compares averages of generated ALFWorld games with those of the real games.

python benchmarks/compare_alfworld_games.py --games 600   # with the real games if $ALFWORLD_DATA is set
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from harness import table
from scripted_plan import scripted_plan

from epo_trl.cli.base import at_least
from epo_trl.envs.alfworld import AlfworldData
from epo_trl.envs.alfworld.game_files import GAME_FILE, load_game
from epo_trl.envs.alfworld.generator import generate
from epo_trl.envs.alfworld.pddl import TASK_TYPES
from epo_trl.envs.alfworld.rooms import ROOM_TYPES, alfred
from epo_trl.envs.alfworld.scene import Scene

Games = list[tuple[int, Scene, int]]  # room number, game, number of actions of a winning plan


def real_games(split: str, limit: int) -> Games:
    """Loads an even sample of at most `limit` games from a list of `$ALFWORLD_DATA`."""
    suite = AlfworldData()
    ids = suite.task_ids(split)
    games = []
    for task_id in ids[:: max(1, len(ids) // limit)][:limit]:
        file = suite.root / task_id / GAME_FILE
        plan = json.loads(file.read_text(encoding="utf-8"))["walkthrough"]
        games.append((int(Path(task_id).parent.name.split("-")[-1]), Scene.of(load_game(file)), len(plan)))
    return games


def generated_games(split: str, limit: int) -> Games:
    """Generates `limit` games."""
    games = []
    for index in range(limit):
        generated = generate(split, index, seed=0)
        scene = Scene.of(generated.game)
        games.append((generated.spec.room, scene, len(scripted_plan(scene))))
    return games


def mean(values: Iterable[float]) -> str:
    """Formats the mean with one decimal; a dash if there is no value, as for a room type without games."""
    there = list(values)
    return f"{statistics.fmean(there):.1f}" if there else "-"


def _lying(scene: Scene) -> dict[str, str]:
    """Returns the objects in or on furniture, and their kinds; real rooms also have windows, chairs, stove knobs."""
    things = {thing for things in scene.start.contents.values() for thing in things}
    return {thing: kind for thing, kind in scene.object_type.items() if thing in things}


def rows(games: Games) -> dict[str, str]:
    """Computes the averages by name."""
    types = Counter(scene.goal.task_type for _, scene, _ in games)
    found = {f"share of {name}": f"{types[name] / len(games):.1%}" for name in TASK_TYPES}
    for room_type in ROOM_TYPES:
        here = [scene for room, scene, _ in games if alfred().rooms[room].room_type == room_type]
        found[f"share of {room_type}"] = f"{len(here) / len(games):.1%}"
        found[f"receptacles, {room_type}"] = mean(len(scene.receptacles) for scene in here)
        found[f"things on them, {room_type}"] = mean(len(_lying(scene)) for scene in here)
        found[f"kinds of things on them, {room_type}"] = mean(len(set(_lying(scene).values())) for scene in here)
    every = [scene for _, scene, _ in games]
    found["things per receptacle"] = mean(len(_lying(w)) / len(w.receptacles) for w in every)
    found["percent of receptacles that hold nothing"] = mean(
        100 * sum(not w.start.contents.get(r) for r in w.receptacles) / len(w.receptacles) for w in every
    )
    found["most things on one receptacle"] = mean(max(map(len, w.start.contents.values())) for w in every)
    found["things of the wanted kind"] = mean(list(_lying(w).values()).count(w.goal.object_type) for w in every)
    found["actions of a plan that wins"] = mean(length for *_, length in games)
    return found


def main() -> None:
    """Prints one column per list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=at_least(1), default=600, help="maximum number of games per list")
    args = parser.parse_args()
    columns = {}
    for split in ("train", "iid", "ood"):
        if any(Path(os.environ.get("ALFWORLD_DATA", "/nowhere")).rglob(GAME_FILE)):
            columns[f"real {split}"] = rows(real_games(split, args.games))
        columns[f"generated {split}"] = rows(generated_games(split, args.games))
    names = list(next(iter(columns.values())))
    print(table(["", *columns], [[name, *(column[name] for column in columns.values())] for name in names]))


if __name__ == "__main__":
    main()
