"""A scripted ALFWorld player that reads observations, the task's type and the admissible actions, and explores."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

from epo_trl.envs.alfworld.notes import EMPTY_HANDS, MIDDLE, SHOWN, remember
from epo_trl.envs.alfworld.pddl import BY_TASK_TYPE, Treatment
from epo_trl.envs.base import EnvError, Info

_LOOK = re.compile(r"(?:look at|examine the) (\w+) (?:under|with) the (\w+)")
_PUT = re.compile(
    r"(?:put|find|clean|heat|cool) (?:a |some |two |the )?(?:clean |hot |cool )?(\w+) "
    r"(?:and put (?:it|them) )?(?:in |on )?(\w+)"
)
Choice = tuple[str, str]


def parse_kind(name: str) -> str:
    """Returns the kind of an object, for example `"drawer"` for `"drawer 3"`."""
    return name.rpartition(" ")[0]


class AlfworldExpert:
    """Explores unvisited receptacles and remembers where it saw each object.

    `odds` are mean numbers of objects of a kind on a receptacle of a kind, `{(object, receptacle): mean}`. With them
    the expert searches the likeliest receptacles first, ties in the order of the first observation; else at random.
    """

    def __init__(self, seed: int = 0, odds: Mapping[tuple[str, str], float] | None = None) -> None:
        self._random = random.Random(seed)
        self._odds = odds

    def reset(self, observation: str, info: Info) -> None:
        """Starts an episode; `EnvError` if the task sentence is not one of ALFWorld's templates."""
        task = info["task"]
        match = (_LOOK if info["task_type"] == "look_at_obj_in_light" else _PUT).fullmatch(task)
        if match is None:
            raise EnvError(f"task: expected one of ALFWorld's sentence templates, got {task!r}")
        self._object, self._target = match.groups()
        self._is_look = info["task_type"] == "look_at_obj_in_light"
        self._treatment = BY_TASK_TYPE.get(info["task_type"])
        self._receptacles = (info["here"], *info["unvisited"]) if info["here"] != MIDDLE else info["unvisited"]
        self._seen: dict[str, str] = {}  # object -> receptacle
        self._looked: set[str] = set()  # receptacles with known contents
        self._trying = ""  # the next receptacle to search
        self._treated: set[str] = set()
        self._target_place = ""

    def act(self, observation: str, info: Info) -> Choice:
        """Returns `(thought, action)`, both in lower case; the thought names the target."""
        self._seen = remember(self._seen, observation)
        if shown := SHOWN.search(observation):
            self._looked.add(shown[1])
        held = info["holding"]
        if self._treatment and observation.startswith(f"You {self._treatment.verb} the {held} "):
            self._treated.add(held)
        if held == EMPTY_HANDS:
            return self._fetch(info)
        if self._is_look:
            return self._use_lamp(info)
        if self._treatment and held not in self._treated:
            return self._treat(self._treatment, held, info)
        return self._bring(held, info)

    def _fetch(self, info: Info) -> Choice:
        wanted = [thing for thing in self._seen if parse_kind(thing) == self._object and not self._is_done(thing)]
        if not wanted:
            return self._explore(self._object, info)
        thing = next((t for t in wanted if self._seen[t] == info["here"]), wanted[0])
        place = self._seen[thing]
        step = self._reach(place, info)
        return (f"get {thing} from {place}", step) if step else (f"take {thing}", f"take {thing} from {place}")

    def _is_done(self, thing: str) -> bool:
        """Whether a seen object is already where the task wants it."""
        place = self._seen[thing]
        if self._is_look or parse_kind(place) != self._target or (self._treatment and thing not in self._treated):
            return False
        return place == self._destination()

    def _destination(self) -> str:
        """Returns the receptacle to fill: one that already holds some of the objects, else the first of its type."""
        if not self._target_place:
            holding = [
                p for t, p in self._seen.items() if parse_kind(t) == self._object and parse_kind(p) == self._target
            ]
            places = sorted((r for r in self._receptacles if parse_kind(r) == self._target), key=lambda r: (len(r), r))
            self._target_place = (holding + places + [""])[0]
        return self._target_place

    def _explore(self, kind: str, info: Info) -> Choice:
        if not self._trying or self._trying in self._looked:
            left = [place for place in self._receptacles if place not in self._looked]
            if not left:  # every receptacle was searched: search again
                self._looked.clear()
                left = list(self._receptacles) or [self._trying]
            if self._odds is None:
                self._trying = self._random.choice(left)
            else:
                odds = self._odds
                self._trying = max(left, key=lambda place: odds.get((kind, parse_kind(place)), 0.0))
        place = self._trying
        step = self._reach(place, info) or f"examine {place}"
        verb = "open" if step.startswith("open ") else "try"
        return f"find {kind} , {verb} {place}", step if step in info["admissible_actions"] else "look"

    def _reach(self, place: str, info: Info) -> str:
        """Returns the next action towards a receptacle, or `""` if it is in front of the agent and open.

        Several receptacles can be in front at once; the game offers no `go to` for those.
        """
        for action in (f"go to {place}", f"open {place}"):
            if action in info["admissible_actions"]:
                return action
        return ""

    def _use_lamp(self, info: Info) -> Choice:
        lamp = next((thing for thing in self._seen if parse_kind(thing) == self._target), None)
        if lamp is None:
            return self._explore(self._target, info)
        place = self._seen[lamp]
        going = f"go to {place}"
        if going in info["admissible_actions"]:
            return f"use {lamp} at {place}", going
        return f"use {lamp}", f"use {lamp}"

    def _treat(self, treatment: Treatment, held: str, info: Info) -> Choice:
        kind = treatment.tool.lower()
        tool = next((r for r in self._receptacles if parse_kind(r) == kind), None)
        if tool is None:
            return f"find {kind} , look", "look"
        thought = f"{treatment.verb} {held} with {tool}"
        going = f"go to {tool}"
        if going in info["admissible_actions"]:
            return thought, going
        return thought, thought

    def _bring(self, held: str, info: Info) -> Choice:
        place = self._destination()
        thought = f"put {held} in {place}"
        step = self._reach(place, info)
        return thought, step or f"move {held} to {place}"
