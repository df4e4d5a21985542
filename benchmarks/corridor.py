"""Corridor: a text game with optimal values in closed form, to test a critic. Standard library only.

A row of rooms, each with a red and a blue door. One door leads on, the other back to the first room; which one leads on
differs from room to room. The door that leads on from the last room leads out. With enough turns almost every policy
gets out in the end, so winning an episode is little evidence about any single turn.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

from epo_trl.envs.base import EnvError, Expert, Info, TaskSuite, TextEnv, split_task_id

DOORS = ("red", "blue")
_COPIES = {"train": 8, "iid": 1, "ood": 1}  # tasks that start in each room


def door_on(room: int) -> str:
    """Returns the door that leads on from a room, counted from 1. The same in every process."""
    return random.Random(f"corridor {room}").choice(DOORS)


def optimal_value(room: int, rooms: int, *, gamma: float, reward: float) -> float:
    """Computes the value of a room under the optimal policy: `gamma^(rooms - room) * reward`.

    From there the optimal policy needs `rooms - room + 1` turns, and the reward comes with the last.

    Args:
        room: Room number, from 1 to `rooms`.
        rooms: Length of the corridor.
        gamma: Discount per turn.
        reward: Reward for leaving.
    """
    return gamma ** (rooms - room) * reward


class Corridor(TextEnv):
    """A corridor environment. Besides the required fields, `info` has `place`: `"room 3"` or `"outside"`.

    Args:
        rooms: Length of the corridor.
        move_limit: Number of steps after which the game truncates the episode. No observation depends on the step
            count, so `optimal_value` holds if the states after the limit are bootstrapped.
    """

    is_deterministic = True

    def __init__(self, rooms: int = 8, *, move_limit: int = 20) -> None:
        self.rooms = rooms
        self.move_limit = move_limit
        self.room: int | None = None
        self.moves = 0

    def copy(self) -> Corridor:
        """Returns an independent game in the same state."""
        return copy.copy(self)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Returns the first room of the task `"<split>/<number>"`; only the number decides it."""
        sizes = {split: self.rooms * copies for split, copies in _COPIES.items()}
        _, number = split_task_id((options or {}).get("task_id"), sizes)
        self.room, self.moves = number % self.rooms + 1, 0
        return self._see(), self._info(won=False)

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Goes through a door; any other action changes nothing."""
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


class CorridorExpert(Expert):
    """Chooses the right door in every room."""

    def act(self, observation: str, info: Info) -> tuple[str, str]:
        """Returns `(thought, action)`."""
        door = door_on(int(observation.removesuffix(".").rpartition(" ")[2]))
        return f"The {door} door leads on.", door


class CorridorSuite(TaskSuite):
    """Tasks that start in every room of one corridor. All lists use the same corridor: the agent is to learn it."""

    name = "corridor"
    prompt_template = "corridor"

    def __init__(self, rooms: int = 8, *, move_limit: int = 20) -> None:
        self.rooms = rooms
        self.move_limit = move_limit

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the task ids of a split."""
        self.check_split(split)
        return tuple(f"{split}/{number}" for number in range(self.rooms * _COPIES[split]))

    def make_env(self) -> Corridor:
        """Creates a fresh game."""
        return Corridor(self.rooms, move_limit=self.move_limit)

    def make_expert(self, seed: int = 0) -> CorridorExpert:
        """Creates an expert that always wins."""
        return CorridorExpert()
