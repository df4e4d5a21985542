"""A scripted ScienceWorld player that follows the gold path. It knows more than the agent is shown."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence

from epo_trl.envs.base import Info
from epo_trl.envs.scienceworld.world import AMBIGUOUS

# The player's thoughts before an action, by the action's arguments.
_THOUGHTS = [
    (re.compile(pattern), thought)
    for pattern, thought in {
        r"(?:go|teleport) (?:to )?(.+)": "I have to be in the {0}.",
        r"open door to (.+)": "The door to the {0} has to be open.",
        r"open (.+)": "What I need may be in the {0}.",
        r"close (.+)": "The {0} has to be shut.",
        r"pick up (.+)": "I need the {0}.",
        r"(?:put down|drop) (.+)": "I do not need to hold the {0}.",
        r"focus on (.+)": "The task asks me to focus on the {0}.",
        r"move (.+) to (.+)": "The {0} belongs in the {1}.",
        r"(?:pour|dunk) (.+) (?:in|into) (.+)": "The {0} belongs in the {1}.",
        r"connect (.+?) to (.+)": "The {0} has to be joined to the {1}.",
        r"use (.+?) (?:on|in) (.+)": "The {0} tells me about the {1}.",
        r"use (.+)": "I can work with the {0}.",
        r"activate (.+)": "The {0} has to be on.",
        r"deactivate (.+)": "The {0} has to be off.",
        r"mix (.+)": "What is in the {0} has to be mixed.",
        r"read (.+)": "The {0} may say what to do.",
        r"(?:look at|look in|examine) (.+)": "I want to know more about the {0}.",
        r"wait1?": "This takes time.",
        r"look around": "Let me see what is here.",
        r"inventory": "Let me see what I have.",
        r"\d+": "I mean that one.",
    }.items()
]
DONE = ("There is nothing left to do.", "look around")


def thought_for(action: str) -> str:
    """Returns a short reason for an action."""
    for pattern, thought in _THOUGHTS:
        match = pattern.fullmatch(action)
        if match:
            return thought.format(*match.groups())
    return f"The next thing to do is: {action}."


_DOOR, _GO, _TELEPORT = "open door to ", "go to ", "teleport to "


def with_teleports(path: Sequence[str], rate: float, chance: random.Random) -> tuple[str, ...]:
    """Replaces a share of the path's walks, doors included, by one teleport to the end of each walk."""
    found: list[str] = []
    for is_walk, part in itertools.groupby(path, key=lambda action: action.startswith((_DOOR, _GO))):
        actions = list(part)
        if is_walk and actions[-1].startswith(_GO) and chance.random() < rate:
            actions = [_TELEPORT + actions[-1].removeprefix(_GO)]
        found += actions
    return tuple(found)


class GoldExpert:
    """Plays the gold path of the task whatever it observes; repeats an action that the engine did not understand.

    `path_of` returns the actions that solve a task id; `teleport_rate` is the probability that the player teleports
    where the path walks.
    """

    def __init__(self, path_of: Callable[[str], tuple[str, ...]], teleport_rate: float = 0.0, seed: int = 0) -> None:
        self._path_of, self._teleport_rate = path_of, teleport_rate
        self._chance = random.Random(seed)

    def reset(self, observation: str, info: Info) -> None:
        """Starts an episode, for which a missing gold path is generated."""
        self._path = with_teleports(self._path_of(info["task_id"]), self._teleport_rate, self._chance)
        self._chance.random()  # keeps the teleports of recorded demonstrations
        self._next = 0

    def act(self, observation: str, info: Info) -> tuple[str, str]:
        """Returns `(thought, action)`; at the end of the path, a look around."""
        if self._next and not info["accepted"]:
            self._next -= 1
        if not observation.startswith(AMBIGUOUS):  # the environment has answered it
            while self._next < len(self._path) and self._path[self._next].isdecimal():
                self._next += 1
        if self._next >= len(self._path):
            return DONE
        action = self._path[self._next]
        self._next += 1
        return thought_for(action), action
