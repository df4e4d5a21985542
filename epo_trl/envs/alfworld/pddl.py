"""Parses the PDDL of an ALFWorld game: its facts, the names shown to the agent, and its goal."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from epo_trl.envs.alfworld.object_states import BY_STATE
from epo_trl.envs.base import EnvError
from epo_trl.errors import InputError

FactTable = dict[str, list[tuple[str, ...]]]

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)

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
    """The winning condition of a game.

    Args:
        task_type: One of `TASK_TYPES`.
        object_type: Type of the object to bring or to look at, for example `"soapbar"`.
        target_type: Type of the receptacle to put it in, or of the lamp to look at it under.
        state: `"clean"`, `"hot"`, `"cool"`, or `""` if the object's state does not matter.
        count: Number of objects that must end up in one receptacle.
    """

    task_type: str
    object_type: str
    target_type: str
    state: str = ""
    count: int = 1


def without_comments(text: str) -> str:
    """Removes the comments of a PDDL text."""
    return re.sub(r";[^\n]*", "", text)


def read_facts(problem: str, source: str) -> FactTable:
    """Parses the initial facts by predicate, in lower case.

    Args:
        problem: Text of the PDDL problem.
        source: Path or id of the game, for messages.

    Raises:
        EnvError: If there is no `(:init`, or a fact is not one of `KNOWN_FACTS`.
    """
    text = without_comments(problem).lower()
    match = re.search(r"\(:init(.*)\(:goal", text, re.DOTALL)
    if match is None:
        raise EnvError(f"{source}: the PDDL problem has no '(:init ... (:goal ...' part; the file is corrupt")
    facts: FactTable = defaultdict(list)
    for inner in re.findall(r"\(([^()]+)\)", match.group(1)):
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
    """Parses the goal of a game of one of the six task types.

    Raises:
        EnvError: If the goal has any other form.
    """
    text = without_comments(problem).lower()
    start = text.rfind("(:goal")
    if start < 0:
        raise EnvError(f"{source}: the PDDL problem has no '(:goal'; the file is corrupt")
    try:
        literals, variables = _flatten(_parse(text[start:])[1])
        return _match(literals, variables)
    except (ValueError, IndexError, KeyError) as error:
        goal = " ".join(text[start:].split())
        raise EnvError(
            f"{source}: the fast engine does not support the goal {goal!r} ({error}); play this game with "
            "engine='textworld'"
        ) from error


def _parse(text: str) -> list:
    """Parses the first s-expression of a text into nested lists."""
    stack: list[list] = [[]]
    for token in re.findall(r"[()]|[^\s()]+", text):
        if token == "(":
            stack.append([])
        elif token == ")":
            done = stack.pop()
            stack[-1].append(done)
            if len(stack) == 1:
                return done
        else:
            stack[-1].append(token)
    raise InputError("unbalanced brackets")


def _flatten(node: list) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """Returns the literals of a conjunction under `exists`, and the type of each variable."""
    literals: list[tuple[str, ...]] = []
    variables: dict[str, str] = {}
    todo = [node]
    while todo:
        head, *rest = todo.pop()
        if head == "and":
            todo += rest
        elif head == "exists":
            declared = [token for token in rest[0] if token not in ("-", "#")]
            variables.update(zip(declared[::2], declared[1::2], strict=True))
            todo.append(rest[1])
        elif head == "not" and rest[0][0] == "=":
            literals.append(("differ", *rest[0][1:]))
        elif head in KNOWN_FACTS or head == "holds":
            literals.append((head, *rest))
        else:
            raise InputError(f"unexpected {head!r}")
    return literals, variables


_TREATED = {f"is{state}": treatment for state, treatment in BY_STATE.items()}
Shape = Counter[tuple[str, ...]]
_LOOK: Shape = Counter(
    [
        ("toggleable", "lamp"),
        ("istoggled", "lamp"),
        ("receptacleatlocation", "receptacle", "location"),
        ("atlocation", "agent", "location"),
        ("inreceptacle", "lamp", "receptacle"),
        ("holds", "agent", "object"),
    ]
)
_PUT: Shape = Counter([("inreceptacle", "object", "receptacle")])
_TWO: Shape = Counter({("inreceptacle", "object", "receptacle"): 2, ("differ", "object", "object"): 1})


def _match(literals: list[tuple[str, ...]], variables: dict[str, str]) -> Goal:
    """Finds the goal with exactly these literals, after variables are renamed to their roles."""
    roles = variables | {literal[1]: "lamp" for literal in literals if literal[0] == "toggleable"}
    rest = [literal for literal in literals if not literal[0].endswith("type")]
    shape: Shape = Counter((name, *(roles[argument] for argument in arguments)) for name, *arguments in rest)
    uses = Counter(roles.values())
    object_type = _find_common_type("object", literals, roles)
    if shape == _LOOK and uses["lamp"] == uses["object"] == uses["receptacle"] == uses["location"] == 1:
        return Goal("look_at_obj_in_light", object_type, _find_common_type("lamp", literals, roles))
    target_type = _find_common_type("receptacle", literals, roles)
    if shape == _TWO and uses["object"] == 2 and uses["receptacle"] == 1:
        return Goal("pick_two_obj_and_place", object_type, target_type, count=2)
    wanted = next((_TREATED[name] for name, *_ in rest if name in _TREATED), None)
    expected = _PUT + Counter([(wanted.ability.lower(), "object"), (f"is{wanted.state}", "object")] if wanted else [])
    if shape != expected or uses["object"] != 1 or uses["receptacle"] != 1:
        raise InputError("not one of the six task types")
    if wanted is None:
        return Goal("pick_and_place_simple", object_type, target_type)
    return Goal(wanted.task_type, object_type, target_type, state=wanted.state)


def _find_common_type(role: str, literals: list[tuple[str, ...]], roles: dict[str, str]) -> str:
    """Returns the common type of all variables of a role."""
    types = {literal[1]: literal[2].removesuffix("type") for literal in literals if literal[0].endswith("type")}
    found = {types.get(variable, "") for variable in roles if roles[variable] == role}
    if len(found) != 1 or "" in found:
        raise InputError(f"the {role} of the goal has several types")
    return found.pop()
