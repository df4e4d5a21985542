"""Corridor: a text game whose optimal values are known in closed form, to test a critic. Standard library only.

A row of rooms, each with a red and a blue door. One of them leads on, the other back to the first room; which is which
differs from room to room. The door that leads on from the last room leads out. Given time, almost every player gets out
in the end: that an episode was won says little about any one of its turns.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from epo_trl.envs.base import EnvError, Info, TaskSuite, TextEnv

DOORS = ("red", "blue")
_COPIES = {"train": 8, "iid": 1, "ood": 1}  # tasks that begin in each room


def door_on(room: int) -> str:
    """Returns the door that leads on from a room, counted from 1. The same in every process."""
    return random.Random(f"corridor {room}").choice(DOORS)


def optimal_value(room: int, rooms: int, *, gamma: float, reward: float) -> float:
    """Returns the value of a room under the best policy: `gamma^(rooms - room) * reward`.

    From there the best policy takes `rooms - room + 1` turns, and the reward comes with the last.

    Args:
        room: From 1 to `rooms`.
        rooms: Length of the corridor.
        gamma: Discount from turn to turn.
        reward: Paid for leaving.
    """
    return gamma ** (rooms - room) * reward


class Corridor(TextEnv):
    """Plays a corridor. Beside the fields of the contract, `info` has `place`: `"room 3"` or `"outside"`.

    Args:
        rooms: Its length.
        move_limit: The game truncates the episode after so many steps. Nothing that is shown depends on their number,
            so the values of `optimal_value` hold if what comes after the limit is bootstrapped.
    """

    def __init__(self, rooms: int = 8, *, move_limit: int = 20) -> None:
        self.rooms = rooms
        self.move_limit = move_limit
        self.room: int | None = None
        self.moves = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Returns the first room of the task `"<split>/<number>"`; the number alone decides it."""
        task_id = (options or {}).get("task_id")
        split, _, number = str(task_id).partition("/")
        if split not in _COPIES or not number.isdecimal() or int(number) >= self.rooms * _COPIES[split]:
            raise EnvError(f'options["task_id"]: got {task_id!r}, takes an id of CorridorSuite, for example "train/0"')
        self.room, self.moves = int(number) % self.rooms + 1, 0
        return self._see(), self._info(won=False)

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Goes through a door; any other text changes nothing."""
        if self.room is None:
            raise EnvError("step: no episode is running; call reset(options={'task_id': ...}) first")
        self.moves += 1
        if action in DOORS:
            self.room = self.room + 1 if action == door_on(self.room) else 1
        won = self.room > self.rooms
        truncated = not won and self.moves >= self.move_limit
        result = self._see(), float(won), won, truncated, self._info(won)
        if won or truncated:
            self.room = None
        return result

    def _see(self) -> str:
        assert self.room is not None
        return "You are out." if self.room > self.rooms else f"You are in room {self.room}."

    def _info(self, won: bool) -> Info:
        place = "outside" if won else f"room {self.room}"
        return {"admissible_actions": DOORS, "won": won, "task": "leave", "task_type": "corridor", "place": place}


class CorridorExpert:
    """Takes the right door of every room."""

    def reset(self, observation: str, info: Info) -> None:
        """Nothing to remember: the observation names the room."""

    def act(self, observation: str, info: Info) -> tuple[str, str]:
        """Returns `(thought, action)`."""
        door = door_on(int(observation.removesuffix(".").rpartition(" ")[2]))
        return f"The {door} door leads on.", door


class CorridorSuite(TaskSuite):
    """Tasks that begin in every room of one corridor. All lists play the same corridor: it is there to be learned."""

    name = "corridor"

    def __init__(self, rooms: int = 8, *, move_limit: int = 20) -> None:
        self.rooms = rooms
        self.move_limit = move_limit

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the task ids of a split."""
        self.check_split(split)
        return tuple(f"{split}/{number}" for number in range(self.rooms * _COPIES[split]))

    def make_env(self) -> Corridor:
        """Returns a fresh game."""
        return Corridor(self.rooms, move_limit=self.move_limit)

    def make_expert(self, seed: int = 0) -> CorridorExpert:
        """Returns a player that always wins."""
        return CorridorExpert()
