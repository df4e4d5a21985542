"""ALFWorld in pure Python, about a thousand times faster than TextWorld's engine, with the same texts and rules."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from epo_trl.envs.alfworld.pddl import BY_STATE, TREATMENTS, Treatment
from epo_trl.envs.alfworld.scene import Scene

NOTHING = "Nothing happens."
_KNIVES = ("knife", "butterknife")
# The description of a held object: the first row whose marks the object has.
_LOOKS = (
    (("clean", "hot", "sliced"), "hot and clean sliced"),
    (("clean", "cool", "sliced"), "cool and clean sliced"),
    (("clean", "sliced"), "clean sliced"),
    (("hot", "sliced"), "hot sliced"),
    (("cool", "sliced"), "cool sliced"),
    (("clean", "hot"), "hot and clean"),
    (("clean", "cool"), "cool and clean"),
    (("hot",), "hot"),
    (("clean",), "clean"),
    (("cool",), "cold"),
)


class State:
    """One episode of a game. Cheap to create, copy and step; holds no global state.

    Attributes:
        admissible: Actions that have an effect now, sorted.
        won: Whether the goal is reached now.
    """

    __slots__ = (
        *("scene", "location", "held", "opened", "contents", "seen_from", "taken", "marks"),
        *("admissible", "won", "_commands"),
    )

    def __init__(self, scene: Scene) -> None:
        start = scene.start
        self.scene = scene
        self.location = start.location
        self.held = ""  # the object in the agent's hand
        self.opened = start.opened
        self.contents = dict(start.contents)  # receptacle -> objects, in list order
        self.seen_from = dict(start.seen_from)  # object -> locations where the game believes it to be
        self.taken: frozenset[tuple[str, str]] = frozenset()  # (object, receptacle) of objects taken and not put back
        self.marks = dict(start.marks)  # "clean", "hot", "cool", "toggled", "sliced" -> objects
        self._refresh()

    def copy(self) -> State:
        """Returns an independent copy of the current state."""
        twin = State.__new__(State)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.contents, twin.seen_from, twin.marks = dict(self.contents), dict(self.seen_from), dict(self.marks)
        return twin

    def key(self) -> str:
        """Returns a short text that two states of one game share only if they are equal, in every process."""
        parts = (
            (self.location, self.held, sorted(self.opened), sorted(self.taken)),
            sorted(item for item in self.contents.items() if item[1]),
            *(
                sorted((name, sorted(names)) for name, names in held.items() if names)
                for held in (self.seen_from, self.marks)
            ),
        )
        return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()

    def step(self, action: str) -> str:
        """Performs an action and returns the game's response. An action that is not admissible changes nothing."""
        action = action.strip()
        destination = self.scene.travel(self.location)[0].get(action)
        if destination is not None:
            self.location = destination
            receptacle = action.removeprefix("go to ")
            text = f"You arrive at {receptacle}. {self._receptacle_text(receptacle)}"
        else:
            handler, *arguments = self._commands.get(action, (None,))
            if handler is None:
                return NOTHING
            text = handler(self, *arguments)
            if handler in _IDLE:
                return text
        self._refresh()
        return text

    def describe(self) -> str:
        """Returns the response to `look` at the start of the game; later, `look` from mid-room lists no receptacles."""
        if self.location in self.scene.at:
            return self._look()
        return f"{_MIDDLE}{_listing(list(self.scene.receptacles))}."

    # Admissible actions and the goal check.

    def _refresh(self) -> None:
        commands: dict[str, tuple[Any, ...]] = {
            "help": (State._help,),
            "inventory": (State._inventory,),
            "look": (State._look,),
        }
        for receptacle in self.scene.at.get(self.location, ()):
            self._add_commands_at(receptacle, commands)
        if self.held:
            commands[f"examine {self.held}"] = (State._object_text, self.held)
            if self.scene.object_type.get(self.held) in _KNIVES:
                for thing in self.scene.having["sliceable"]:
                    if self.location in self.seen_from.get(thing, ()):
                        commands[f"slice {thing} with {self.held}"] = (State._slice, thing)
        self._commands = commands
        self.admissible = tuple(sorted(self.scene.travel(self.location)[1] + list(commands)))
        self.won = self._is_won()

    def _add_commands_at(self, receptacle: str, commands: dict[str, tuple[Any, ...]]) -> None:
        scene, held, contents = self.scene, self.held, self.contents.get(receptacle, ())
        commands[f"examine {receptacle}"] = (State._receptacle_text, receptacle)
        if receptacle not in scene.having["openable"]:
            reachable = True
        elif receptacle in self.opened:
            reachable = True
            commands[f"close {receptacle}"] = (State._close, receptacle)
        else:
            reachable = False
            commands[f"open {receptacle}"] = (State._open, receptacle)
        kind = scene.receptacle_type.get(receptacle, "")
        if reachable and held and scene.object_type.get(held) in scene.holdable.get(kind, ()):
            commands[f"move {held} to {receptacle}"] = (State._put, held, receptacle)
        for thing in contents:
            if reachable and not held and thing in scene.having["pickupable"]:
                commands[f"take {thing} from {receptacle}"] = (State._take, thing, receptacle)
            if thing in scene.having["toggleable"]:
                commands[f"use {thing}"] = (State._use, thing)
        treatment = _BY_TOOL.get(kind)
        if held and treatment and held in scene.having[treatment.ability.lower()]:
            commands[f"{treatment.verb} {held} with {receptacle}"] = (State._treat, treatment, held, receptacle)

    def _is_won(self) -> bool:
        scene, goal = self.scene, self.scene.goal
        if goal.task_type == "look_at_obj_in_light":
            if scene.object_type.get(self.held) != goal.object_type:
                return False
            near = (thing for r in scene.at.get(self.location, ()) for thing in self.contents.get(r, ()))
            return any(
                scene.object_type.get(t) == goal.target_type
                and t in self.marks["toggled"]
                and t in scene.having["toggleable"]
                for t in near
            )
        return any(
            sum(map(self._counts, things)) >= goal.count
            for receptacle, things in self.contents.items()
            if len(things) >= goal.count and scene.receptacle_type.get(receptacle) == goal.target_type
        )

    def _counts(self, thing: str) -> bool:
        """Whether an object has the goal's type and state."""
        goal = self.scene.goal
        if self.scene.object_type.get(thing) != goal.object_type:
            return False
        if not goal.state:
            return True
        return thing in self.marks[goal.state] and thing in self.scene.having[BY_STATE[goal.state].ability.lower()]

    # Effects of actions.

    def _open(self, receptacle: str) -> str:
        self.opened |= {receptacle}
        return f"You open the {receptacle}. {self._receptacle_text(receptacle)}"

    def _close(self, receptacle: str) -> str:
        self.opened -= {receptacle}
        return f"You close the {receptacle}."

    def _take(self, thing: str, receptacle: str) -> str:
        self.contents[receptacle] = tuple(other for other in self.contents[receptacle] if other != thing)
        self.seen_from[thing] = self.seen_from.get(thing, frozenset()) - {self.location}
        self.taken |= {(thing, receptacle)}
        self.held = thing
        return f"You pick up the {thing} from the {receptacle}."

    def _put(self, thing: str, receptacle: str) -> str:
        things = {*self.contents.get(receptacle, ()), thing}
        self.contents[receptacle] = tuple(sorted(things, key=self.scene.rank.__getitem__))
        self.seen_from[thing] = self.seen_from.get(thing, frozenset()) | {self.location}
        self.taken -= {(thing, receptacle)}
        self.held = ""
        return f"You move the {thing} to the {receptacle}."

    def _treat(self, treatment: Treatment, thing: str, receptacle: str) -> str:
        self.marks[treatment.state] |= {thing}
        if treatment.undoes:
            self.marks[treatment.undoes] -= {thing}
        return f"You {treatment.verb} the {thing} using the {receptacle}."

    def _use(self, thing: str) -> str:
        self.marks["toggled"] |= {thing}
        return f"You turn on the {thing}."

    def _slice(self, thing: str) -> str:
        self.marks["sliced"] |= {thing}
        return f"You sliced the {thing} with the {self.held}."

    # Observations.

    def _receptacle_text(self, receptacle: str) -> str:
        if receptacle not in self.scene.having["openable"]:
            return f"On the {receptacle}, you see {_listing(self.contents.get(receptacle, ()))}."
        if receptacle not in self.opened:
            return f"The {receptacle} is closed."
        return f"The {receptacle} is open. In it, you see {_listing(self.contents.get(receptacle, ()))}."

    def _object_text(self, thing: str) -> str:
        scene = self.scene
        if thing in scene.having["isreceptacleobject"]:
            return f"This is a normal {thing}. In it, you see {_listing(scene.inside.get(thing, ()))}."
        for marks, words in _LOOKS:
            if all(thing in self.marks[mark] for mark in marks):
                return f"This is a {words} {thing}."
        if thing in scene.having["toggleable"] and thing in self.marks["toggled"]:
            return f"This {thing} is on."
        if thing in scene.having["sliceable"] and thing in self.marks["sliced"]:
            return f"This is a sliced {thing}."
        return f"There's nothing special about {thing}."

    def _look(self) -> str:
        here = self.scene.at.get(self.location, ())
        if not here:
            return f"{_MIDDLE}nothing."
        around = sorted(
            (t for t, places in self.seen_from.items() if self.location in places), key=self.scene.rank.__getitem__
        )
        loose = [thing for thing in around for receptacle in here if (thing, receptacle) in self.taken]
        return f"You are facing the {_join(here)}. Next to it, you see {_listing(loose)}."

    def _inventory(self) -> str:
        return f"You are carrying: a {self.held}." if self.held else "You are not carrying anything."

    def _help(self) -> str:
        return self.scene.help_text


_MIDDLE = "You are in the middle of a room. Looking quickly around you, you see "
_BY_TOOL = {treatment.tool.lower(): treatment for treatment in TREATMENTS}
_IDLE: tuple[Callable[..., str], ...] = (
    *(State._help, State._inventory, State._look),
    *(State._receptacle_text, State._object_text),
)


def _join(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])}, and {items[-1]}"


def _listing(names: Sequence[str]) -> str:
    return _join([f"a {name}" for name in names]) if names else "nothing"
