"""Notes that an agent could take for itself: where it went, where it is, what it holds. Read from the texts only."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

MIDDLE = "the middle of the room"
EMPTY_HANDS = "nothing"
SHOWN = re.compile(r"(?:On the|The) ([a-z]+ \d+)(?:, you see| is open\.)")  # the receptacle whose contents are listed
_MOVED = re.compile(r"You move the (\w+ \d+) to the (\w+ \d+)")
_TAKEN = re.compile(r"You pick up the (\w+ \d+) from the ")
_NOT_HERE = ("go to ", "examine ", "look", "inventory", "help")


def listed_things(text: str) -> list[str]:
    """Parses the objects that an observation lists after "you see", for example `["mug 1", "fork 2"]`."""
    return re.findall(r"\ba ([a-z]+ \d+)", text.rpartition("you see ")[2])


def remember(seen: dict[str, str], observation: str, kinds: Container[str] | None = None) -> dict[str, str]:
    """Returns where objects of some `kinds`, or of all, were last `seen` (receptacle by object) by an observation."""
    found: dict[str, str] = {}
    if shown := SHOWN.search(observation):
        seen = {thing: place for thing, place in seen.items() if place != shown[1]}
        found = dict.fromkeys(listed_things(observation), shown[1])
    elif taken := _TAKEN.match(observation):
        seen = {thing: place for thing, place in seen.items() if thing != taken[1]}
    elif moved := _MOVED.match(observation):
        found = {moved[1]: moved[2]}
    return seen | {thing: place for thing, place in found.items() if kinds is None or thing.split()[0] in kinds}


class AgentNotes:
    """Follows one episode through its observations and collects what they have revealed.

    `visited` are the receptacles that the agent went to, in order of the first visit, and those beside them that it
    opened or examined; `unvisited` are the other receptacles of the first observation. `holding` is the held object or
    `"nothing"`. `here` is the agent's place or `"the middle of the room"`. `noted` lists where objects of a kind that
    the task names were last seen, each as `"mug 1 in drawer 2"`. `actions_here` are the admissible actions other than
    `go to ...`, `examine ...`, `look`, `inventory` and `help`.
    """

    __slots__ = ("visited", "unvisited", "holding", "here", "_wanted", "_seen")

    def __init__(self, observation: str, task: str = "") -> None:
        self._wanted = frozenset(task.split())
        self._seen: dict[str, str] = {}  # object -> receptacle
        self.visited: tuple[str, ...] = ()
        self.unvisited: tuple[str, ...] = tuple(listed_things(observation))
        self.holding = EMPTY_HANDS
        self.here = MIDDLE
        if observation.startswith("You are facing the "):  # the game starts in front of something
            self.here = observation.removeprefix("You are facing the ").split(".", 1)[0].split(", ", 1)[0]
            self.unvisited = ()

    def note(self, observation: str) -> None:
        """Records the response to an action."""
        self._seen = remember(self._seen, observation, self._wanted)
        if observation.startswith("You arrive at "):
            self.here = observation[14 : observation.index(".")]
            self._visit(self.here)
        elif observation.startswith("You open the "):
            self._visit(observation[13 : observation.index(".")])
        elif observation.startswith("On the "):  # a receptacle beside the agent's place was examined
            self._visit(observation[7 : observation.index(", you see")])
        elif taken := _TAKEN.match(observation):
            self.holding = taken[1]
        elif observation.startswith("You move the "):
            self.holding = EMPTY_HANDS

    def _visit(self, receptacle: str) -> None:
        if receptacle not in self.visited:
            self.visited += (receptacle,)
            self.unvisited = tuple(name for name in self.unvisited if name != receptacle)

    def fields(self, admissible: tuple[str, ...]) -> dict[str, Any]:
        """Returns the entries for `info`, with the actions that are admissible now."""
        return {
            "visited": self.visited,
            "unvisited": self.unvisited,
            "holding": self.holding,
            "here": self.here,
            "noted": tuple(f"{thing} in {place}" for thing, place in self._seen.items()),
            "actions_here": tuple([action for action in admissible if not action.startswith(_NOT_HERE)]),
        }
