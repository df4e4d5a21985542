"""Parses the PDDL of an ALFWorld game: its facts, the names shown to the agent, and its goal."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from epo_trl.envs.alfworld.rooms import alfred
from epo_trl.envs.base import EnvError

FactTable = dict[str, list[tuple[str, ...]]]

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)


@dataclass(frozen=True, slots=True)
class Treatment:
    """A state change that a task type requires: of an object, by a piece of furniture."""

    task_type: str
    verb: str  # of the agent's action
    tool: str  # class of the furniture that does it, for example `"SinkBasin"`
    ability: str  # property that the object must have, for example `"Cleanable"`
    state: str  # of the object afterwards
    undoes: str = ""  # the state that ends, if any


TREATMENTS = (
    Treatment("pick_clean_then_place_in_recep", "clean", "SinkBasin", "Cleanable", "clean"),
    Treatment("pick_heat_then_place_in_recep", "heat", "Microwave", "Heatable", "hot", undoes="cool"),
    Treatment("pick_cool_then_place_in_recep", "cool", "Fridge", "Coolable", "cool", undoes="hot"),
)
BY_TASK_TYPE = {treatment.task_type: treatment for treatment in TREATMENTS}
BY_STATE = {treatment.state: treatment for treatment in TREATMENTS}

# Predicates by their number of arguments. The first four rows affect the game; the others never affect text, action or
# goal.
_PREDICATES = (
    (1, "cleanable coolable heatable openable pickupable sliceable toggleable isreceptacleobject"),
    (1, "isclean iscool ishot issliced istoggled opened"),
    (2, "atlocation objectatlocation receptacleatlocation objecttype receptacletype"),
    (2, "cancontain inreceptacle inreceptacleobject"),
    (0, "total-cost totalcost"),
    (1, "checked examined full ison isreceptacleobjectfull moveable"),
    (2, "= distance wasinreceptacle"),
)
KNOWN_FACTS = {name: count for count, names in _PREDICATES for name in names.split()}


@dataclass(frozen=True, slots=True)
class Goal:
    """The winning condition of a game."""

    task_type: str  # one of `TASK_TYPES`
    object_type: str  # type of the object to bring or to look at, for example `"soapbar"`
    target_type: str  # type of the receptacle to put it in, or of the lamp to look at it under
    state: str = ""  # `"clean"`, `"hot"`, `"cool"`, or `""` if the object's state does not matter
    count: int = 1  # number of objects that must end up in one receptacle


def without_comments(text: str) -> str:
    """Removes the comments of a PDDL text."""
    return re.sub(r";[^\n]*", "", text)


def read_facts(problem: str, source: str) -> FactTable:
    """Parses the initial facts by predicate, in lower case. `source` names the game in messages.

    Raises:
        EnvError: If a fact is not one of `KNOWN_FACTS`.
    """
    init = without_comments(problem).lower().partition("(:init")[2].rpartition("(:goal")[0]
    facts: FactTable = defaultdict(list)
    for inner in re.findall(r"\(([^()]+)\)", init):
        predicate, *arguments = inner.split()
        if KNOWN_FACTS.get(predicate) != len(arguments):
            raise EnvError(
                f"{source}: the fast engine does not support the fact ({inner.strip()}); play this game with "
                "engine='textworld'"
            )
        facts[predicate].append(tuple(arguments))
    return facts


def display_names(ids: Iterable[str]) -> dict[str, str]:
    """Maps each PDDL id to the name that the agent sees, for example `"drawer 3"`.

    ALFWorld numbers the ids of a class in sorted order, from the highest number down to 1. Ids without coordinates
    keep their text and get a trailing space, as in ALFWorld.
    """
    ordered = sorted(set(ids))
    classes = {i: _parse_class(i) for i in ordered if "_bar_" in i}
    left = Counter(classes.values())
    names = {}
    for i in ordered:
        if i in classes:
            names[i] = f"{classes[i]} {left[classes[i]]}"
            left[classes[i]] -= 1
        else:
            names[i] = f"{i} "
    return names


def _parse_class(identifier: str) -> str:
    return identifier.split("_bar_", 1)[0] + ("basin" if "basin" in identifier else "")


def read_goal(problem: str, source: str) -> Goal:
    """Parses the goal of a game, which is one of ALFRED's six; `EnvError` if the goal has any other form."""
    text = " ".join(without_comments(problem).lower().split())
    goal = text[text.rfind("(:goal") :]
    for task_type, pattern in _goal_patterns().items():
        if match := pattern.fullmatch(goal):
            kinds, treatment = match.groupdict(), BY_TASK_TYPE.get(task_type)
            target = kinds.get("recep") or kinds["toggle"]
            count = 2 if task_type == "pick_two_obj_and_place" else 1
            return Goal(task_type, kinds["obj"], target, treatment.state if treatment else "", count)
    raise EnvError(
        f"{source}: the fast engine does not support the goal {goal!r}; play this game with engine='textworld'"
    )


@cache
def _goal_patterns() -> dict[str, re.Pattern[str]]:
    """Returns a pattern of each task type's goal, with the kinds of object, receptacle and lamp as groups."""
    patterns = {}
    for task_type, goal in alfred().goals.items():
        text = re.escape(" ".join(goal.pddl.replace("#", "-").lower().split()))
        for role in ("obj", "recep", "toggle"):
            name = re.escape(f"{{{role}}}")
            text = text.replace(name, rf"(?P<{role}>\w+)", 1).replace(name, f"(?P={role})")
        patterns[task_type] = re.compile(text)
    return patterns
