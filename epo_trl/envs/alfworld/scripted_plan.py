"""Derives a winning plan from a game's initial state, which proves that the game is solvable."""

from __future__ import annotations

from epo_trl.envs.alfworld.engine import State
from epo_trl.envs.alfworld.object_states import BY_STATE
from epo_trl.envs.alfworld.scene import Scene
from epo_trl.envs.base import EnvError


class _Planner:
    """Plays a game with full knowledge and records its actions."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.state = scene, State(scene)
        self.actions: list[str] = []

    def do(self, action: str) -> None:
        if action not in self.state.admissible:
            raise EnvError(f"the scripted plan for {self.scene.task!r} needs {action!r}, which is not admissible")
        self.state.step(action)
        self.actions.append(action)

    def go(self, receptacle: str) -> None:
        if self.state.location != self.scene.receptacles[receptacle]:
            self.do(f"go to {receptacle}")

    def reach_into(self, receptacle: str) -> None:
        self.go(receptacle)
        if f"open {receptacle}" in self.state.admissible:
            self.do(f"open {receptacle}")

    def take(self, thing: str, receptacle: str) -> None:
        self.reach_into(receptacle)
        self.do(f"take {thing} from {receptacle}")

    def put(self, thing: str, receptacle: str) -> None:
        self.reach_into(receptacle)
        self.do(f"move {thing} to {receptacle}")


def scripted_plan(scene: Scene) -> list[str]:
    """Returns actions that win a game.

    Raises:
        EnvError: If the plan does not win.
    """
    planner, goal = _Planner(scene), scene.goal
    sources = {
        thing: receptacle
        for receptacle, things in scene.start.contents.items()
        for thing in things
        if receptacle in scene.receptacles and scene.receptacle_type.get(receptacle) != goal.target_type
    }
    closed = scene.having["openable"]
    wanted = [t for t in sources if scene.object_type.get(t) == goal.object_type and t in scene.having["pickupable"]]
    wanted.sort(key=lambda thing: (sources[thing] in closed, scene.rank[thing]))
    if goal.task_type == "look_at_obj_in_light":
        lamps = [t for t in sources if scene.object_type.get(t) == goal.target_type]
        for thing, lamp in zip(wanted[:1], lamps[:1], strict=False):
            planner.take(thing, sources[thing])
            planner.go(sources[lamp])
            planner.do(f"use {lamp}")
    else:
        targets = _of_type(scene, goal.target_type)
        for thing in wanted[: goal.count]:
            planner.take(thing, sources[thing])
            if goal.state:
                treatment = BY_STATE[goal.state]
                tool = _of_type(scene, treatment.tool.lower())[0]
                planner.go(tool)
                planner.do(f"{treatment.verb} {thing} with {tool}")
            planner.put(thing, targets[0])
    if not planner.state.won:
        raise EnvError(f"the scripted plan for {scene.task!r} does not win: {planner.actions}")
    return planner.actions


def _of_type(scene: Scene, receptacle_type: str) -> list[str]:
    """Returns the receptacles of a type, with those that are always open first."""
    found = [r for r in scene.receptacles if scene.receptacle_type.get(r) == receptacle_type]
    if not found:
        raise EnvError(f"the room of {scene.task!r} has no {receptacle_type}")
    return sorted(found, key=lambda receptacle: receptacle in scene.having["openable"])
