"""Derives a winning plan from the initial state of an ALFWorld game, which proves that the game is solvable."""

from __future__ import annotations

from epo_trl.envs.alfworld.engine import State
from epo_trl.envs.alfworld.pddl import BY_STATE
from epo_trl.envs.alfworld.scene import Scene
from epo_trl.envs.base import EnvError


def scripted_plan(scene: Scene) -> list[str]:
    """Returns actions that win a game, found with full knowledge of it.

    Raises:
        EnvError: If they do not win.
    """
    state, goal = State(scene), scene.goal
    actions: list[str] = []

    def do(action: str) -> None:
        state.step(action)
        actions.append(action)

    def go(receptacle: str) -> None:
        if state.location != scene.receptacles[receptacle]:
            do(f"go to {receptacle}")

    def reach_into(receptacle: str) -> None:
        go(receptacle)
        if f"open {receptacle}" in state.admissible:
            do(f"open {receptacle}")

    sources = {
        thing: receptacle
        for receptacle, things in scene.start.contents.items()
        for thing in things
        if receptacle in scene.receptacles and scene.receptacle_type.get(receptacle) != goal.target_type
    }
    closed = scene.having["openable"]
    wanted = [t for t in sources if scene.object_type.get(t) == goal.object_type and t in scene.having["pickupable"]]
    wanted.sort(key=lambda thing: (sources[thing] in closed, scene.rank[thing]))
    for thing in wanted[: goal.count]:
        reach_into(sources[thing])
        do(f"take {thing} from {sources[thing]}")
        if goal.task_type == "look_at_obj_in_light":
            lamp = next(t for t in sources if scene.object_type.get(t) == goal.target_type)
            go(sources[lamp])
            do(f"use {lamp}")
            continue
        if goal.state:
            treatment = BY_STATE[goal.state]
            tool = _of_type(scene, treatment.tool.lower())
            go(tool)
            do(f"{treatment.verb} {thing} with {tool}")
        target = _of_type(scene, goal.target_type)
        reach_into(target)
        do(f"move {thing} to {target}")
    if not state.won:
        raise EnvError(f"the scripted plan for {scene.task!r} does not win: {actions}")
    return actions


def _of_type(scene: Scene, receptacle_type: str) -> str:
    """Returns a receptacle of a type, preferably one that is always open."""
    found = (r for r in scene.receptacles if scene.receptacle_type.get(r) == receptacle_type)
    return min(found, key=lambda receptacle: receptacle in scene.having["openable"])
