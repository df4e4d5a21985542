"""`AlfworldEnv`: one ALFWorld game at a time behind the interface of `epo_trl.envs.base`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from epo_trl.envs.alfworld.engine import State
from epo_trl.envs.alfworld.notes import AgentNotes
from epo_trl.envs.alfworld.textworld_engine import TextWorldPlay
from epo_trl.envs.base import NOT_RUNNING, EnvError, Info, TextEnv

ENGINES = ("fast", "textworld")
Play = State | TextWorldPlay  # one episode in either engine


@dataclass(frozen=True, slots=True)
class Opened:
    """A fresh episode with its task and task type."""

    play: Play
    task: str
    task_type: str


class AlfworldEnv(TextEnv):
    """An ALFWorld environment that plays any task of its suite.

    The reward is 1.0 on the step that wins, which also terminates the episode, and 0.0 otherwise. The environment never
    truncates. Besides the required keys, `info` holds `visited`, `unvisited`, `holding`, `here`, `noted` and
    `actions_here` (see `AgentNotes`). `open_task` starts an episode of a task id, or raises `EnvError`.
    """

    is_deterministic = True

    def __init__(self, open_task: Callable[[str], Opened], close_engine: Callable[[], None] | None = None) -> None:
        self._open_task = open_task
        self._close_engine = close_engine
        self._opened: Opened | None = None

    def copy(self) -> AlfworldEnv:
        """Returns an independent environment in the same state. Only the fast engine can."""
        twin = copy.copy(self)
        if self._opened is not None:
            twin._opened, twin._notes = replace(self._opened, play=self._opened.play.copy()), copy.copy(self._notes)
        return twin

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Returns the first observation and info of `options["task_id"]`. Games are deterministic: `seed` is unused.

        With `options["state_key"]`, `info` holds the key of the engine's state: what is where, opened, held and done.

        Raises:
            EnvError: If the task id is missing or unknown, or TextWorld's engine has to give a state key.
        """
        given = options or {}
        self._opened, self._with_key = self._open_task(str(given.get("task_id"))), bool(given.get("state_key"))
        observation = self._opened.play.describe()
        self._notes = AgentNotes(observation, self._opened.task)
        return observation, self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Returns `(observation, reward, terminated, truncated, info)`."""
        if self._opened is None:
            raise EnvError(NOT_RUNNING)
        play = self._opened.play
        before = play.won
        observation = play.step(action)
        self._notes.note(observation)
        won = play.won
        return observation, float(won and not before), won, False, self._info()

    def close(self) -> None:
        """Frees the engine. May be called twice."""
        self._opened = None
        if self._close_engine is not None:
            self._close_engine()

    def _info(self) -> Info:
        opened = self._opened
        assert opened is not None
        admissible = opened.play.admissible
        return {
            "admissible_actions": admissible,
            "won": opened.play.won,
            "task": opened.task,
            "task_type": opened.task_type,
            **self._notes.fields(admissible),
            **({"state_key": opened.play.key()} if self._with_key else {}),
        }
