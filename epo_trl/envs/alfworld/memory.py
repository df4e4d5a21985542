"""What an agent could note down for itself: where it went, where it stands, what it holds. Read from the texts only."""

from __future__ import annotations

import re
from typing import Any

MIDDLE = "the middle of the room"
EMPTY_HANDS = "nothing"
_NOT_HERE = ("go to ", "examine ", "look", "inventory", "help")


def listed_things(text: str) -> list[str]:
    """Returns the things that an observation lists after "you see", for example `["mug 1", "fork 2"]`."""
    return re.findall(r"\ba ([a-z]+ \d+)", text.rpartition("you see ")[2])


class AgentMemory:
    """Follows one episode by its observations, and returns what they told so far.

    Args:
        observation: The first observation.
    """

    __slots__ = ("visited", "unvisited", "holding", "here")

    def __init__(self, observation: str) -> None:
        self.visited: tuple[str, ...] = ()
        self.unvisited: tuple[str, ...] = tuple(listed_things(observation))
        self.holding = EMPTY_HANDS
        self.here = MIDDLE
        if observation.startswith("You are facing the "):  # a game that starts in front of something
            self.here = observation.removeprefix("You are facing the ").split(".", 1)[0].split(", ", 1)[0]
            self.unvisited = ()

    def note(self, observation: str) -> None:
        """Updates the memory with the answer to an action."""
        if observation.startswith("You arrive at "):
            self.here = observation[14 : observation.index(".")]
            if self.here not in self.visited:
                self.visited += (self.here,)
                self.unvisited = tuple(name for name in self.unvisited if name != self.here)
        elif observation.startswith("You pick up the "):
            self.holding = observation[16 : observation.index(" from the ")]
        elif observation.startswith(("You move the ", "You put the ")):
            self.holding = EMPTY_HANDS

    def fields(self, admissible: tuple[str, ...]) -> dict[str, Any]:
        """Returns the entries that the memory adds to `info`.

        Args:
            admissible: The actions that are admissible now.
        """
        return {
            "visited": self.visited,
            "unvisited": self.unvisited,
            "holding": self.holding,
            "here": self.here,
            "actions_here": tuple([action for action in admissible if not action.startswith(_NOT_HERE)]),
        }
