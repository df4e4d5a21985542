"""Trap: a text game with a good shortcut and a better way, to test exploration. Standard library only.

A row of rooms, each with the same coloured doors. One of them leads on (which one differs from room to room); the
others lead back to the first room. Behind the last room is the way out. The first room also has a low door, the hatch:
it ends the game, which is then won with a fixed probability. A policy that prefers the hatch wins that often from the
start, and every win reinforces the hatch. To learn the way it has to try door after door, without reward until the last
one.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from epo_trl.bounds import Count, Range, Share, check_bounds, option
from epo_trl.envs.base import NOT_RUNNING, EnvError, Expert, Info, TaskSuite, TextEnv, split_task_id

COLOURS = ("red", "blue", "green", "yellow", "white", "black")
HATCH = "low"
_ORDER = (1, 3, 0, 2)  # index of the door that leads on, room by room
_GAMES = {"train": 400, "iid": 100, "ood": 100, "practice": 600}
_PICTURES = (
    "a heron", "an anchor", "two lemons", "the sea", "a lighthouse", "a fox", "an old bridge",
    "three sisters", "a violin", "a snowy hill", "a market", "a sleeping cat", "a harbour", "a windmill",
    "some tulips", "an owl", "a steam engine", "a kite", "a queen", "a beehive", "a ladder", "a comet",
    "a teapot", "an orchard", "a glacier", "a juggler",
)  # fmt: skip


def door_on(room: int, doors: int) -> str:
    """Returns the colour of the door that leads on from a room, counted from 1."""
    return COLOURS[_ORDER[(room - 1) % len(_ORDER)] % doors]


def go_through(colour: str) -> str:
    """Returns the action that goes through a coloured door."""
    return f"go through the {colour} door"


class Trap(TextEnv):
    """A trap environment. Besides the required fields, `info` has `place` (`"room 3"`, `"outside"` or `"the hatch"`).

    Each environment of a suite has a `number` and draws the hatch's outcomes from its own random stream, so the
    episodes of a group are independent although they start from the identical state. Worker processes (`env_workers`)
    and ranks number their environments anew: equal numbers share a stream.
    """

    def __init__(self, rooms: int, doors: int, hatch: float, move_limit: int, number: int = 0) -> None:
        self.rooms, self.doors, self.hatch, self.move_limit = rooms, doors, hatch, move_limit
        self.reseed(number)
        self.actions = {go_through(colour): colour for colour in (*COLOURS[:doors], HATCH)}
        self.place: int | str | None = None
        self.moves = 0

    def reseed(self, seed: int) -> None:
        """Seeds the outcomes of the hatch."""
        self._stream, self._copies = f"hatch {seed}", 0
        self.luck = random.Random(self._stream)

    def copy(self) -> Trap:
        """Returns an independent game in the same state, with another random stream for its hatch."""
        twin, self._copies = copy.copy(self), self._copies + 1
        twin._stream, twin._copies = f"{self._stream}/{self._copies}", 0
        twin.luck = random.Random(twin._stream)
        return twin

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Returns the first room of the game `"<split>/<number>"`; games of `practice` start in each room in turn."""
        task_id = (options or {}).get("task_id")
        split, number = split_task_id(task_id, _GAMES)
        self.picture = random.Random(f"trap {task_id}").choice(_PICTURES)
        self.place, self.moves = (number % self.rooms + 1 if split == "practice" else 1), 0
        return self._see(), self._info(won=False)

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Goes through a door; any other action changes nothing."""
        if not isinstance(self.place, int):
            raise EnvError(NOT_RUNNING)
        self.moves += 1
        colour = self.actions.get(action)
        won = False
        if colour == HATCH and self.place == 1:
            self.place, won = "the hatch", self.luck.random() < self.hatch
        elif colour is not None:
            self.place = self.place + 1 if colour == door_on(self.place, self.doors) else 1
            if self.place > self.rooms:
                self.place, won = "outside", True
        over = isinstance(self.place, str)
        truncated = not over and self.moves >= self.move_limit
        result = self._see(), float(won), over, truncated, self._info(won)
        if truncated:
            self.place = None
        return result

    def _see(self) -> str:
        if self.place == "the hatch":
            return "You fall through the low door, and the game is over."
        if self.place == "outside":
            return "You are out."
        return f"You are in room {self.place}. On the wall is a picture of {self.picture}."

    def _info(self, won: bool) -> Info:
        place = f"room {self.place}" if isinstance(self.place, int) else str(self.place)
        return {
            "admissible_actions": tuple(self.actions), "won": won, "task": "leave", "task_type": "trap", "place": place,
        }  # fmt: skip


class Walker(Expert):
    """The demonstrator of the warm start: it goes the way, or prefers the hatch and takes random doors otherwise.

    `liking` is the logit of the hatch in the first room, where every other door has 0; `None` goes the way.
    """

    def __init__(self, doors: int, liking: float | None, seed: int) -> None:
        self.doors, self.liking, self.random = doors, liking, random.Random(f"habit {seed}")

    def act(self, observation: str, info: Info) -> tuple[str, str]:
        """Returns `(thought, action)` with an empty thought."""
        room = int(info["place"].removeprefix("room "))
        if self.liking is None:
            return "", go_through(door_on(room, self.doors))
        weights = [1.0] * self.doors + [math.exp(self.liking) if room == 1 else 1.0]
        return "", go_through(self.random.choices((*COLOURS[: self.doors], HATCH), weights)[0])


@dataclass(eq=False)
class TrapSuite(TaskSuite):
    """Games of one trap that differ only in a picture. All lists are alike."""

    name = "trap"
    prompt_template = "corridor"
    instant = True

    rooms: Count = option(3, "Number of rooms.")
    doors: Annotated[int, Range(least=2, most=len(COLOURS))] = option(4, "Number of coloured doors in each room.")
    hatch: Share = option(0.35, "Probability that the hatch wins.")
    liking: float | None = option(
        None, "Warm start: logit of the hatch in the first room; null imitates the best player instead."
    )
    move_limit: Count = option(12, "Number of steps after which the game ends.")

    def __post_init__(self) -> None:
        check_bounds(self)
        self._made = 0

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the task ids of a split."""
        self.check_split(split)
        return tuple(f"{split}/{number}" for number in range(_GAMES[split]))

    def demonstration_tasks(self, split: str, max_turns: int, count: int | None = None) -> Sequence[str]:
        """Returns practice games, which start in every room: a player that prefers the hatch sees no others."""
        return tuple(f"practice/{number}" for number in range(_GAMES["practice"]))[:count]

    def make_env(self) -> Trap:
        """Creates a fresh game."""
        self._made += 1
        return Trap(self.rooms, self.doors, self.hatch, self.move_limit, self._made)

    def make_expert(self, seed: int = 0) -> Walker:
        """Creates the player that the warm start imitates."""
        return Walker(self.doors, self.liking, seed)
