"""Common base of the Gymnasium and OpenEnv adapters: tasks are seeds, and named fields describe the state.

`train/17` is seed 17, `iid/17` is seed 1,000,017. The settings name the fields that are read from Gymnasium's info or
OpenEnv's observation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, ClassVar

from epo_trl.bounds import Range, check_bounds, option
from epo_trl.envs.base import NOT_RUNNING, EnvError, Expert, Info, TaskSuite, TextEnv, split_task_id
from epo_trl.envs.border import flag, reaches
from epo_trl.envs.registry import named_object

FIRST_SEED = {"train": 0, "iid": 1_000_000}
NO_ACTION = "This is not an action here."
_Tasks = Annotated[int, Range(least=1, most=FIRST_SEED["iid"])]


@dataclass(eq=False)
class NumberedArguments(TaskSuite):
    """Seeds as tasks, and the names of the fields that describe the environment's state.

    Subclasses set `name` and implement `make_env`.
    """

    splits = ("train", "iid")
    verbatim = True
    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset(["test_tasks", "demonstrator"])

    task_text: str = option("", "Task description; by default the environment's field `task`, or its name.")
    train_tasks: _Tasks = option(1000, "Training seeds: 0, 1, 2, ...")
    test_tasks: _Tasks = option(100, "Seeds of the list `iid`: 1000000, 1000001, ...")
    won_key: str = option("is_success", "Name of the field that tells at the end whether the task is solved.")
    won_score: float | None = option(1.0, "Without that field: a sum of rewards that counts as solved; null: never.")
    actions_key: str = option("admissible_actions", "Name of the field that lists the available actions, if any.")
    accepted_key: str = option("accepted", "Name of the field that tells whether the last action was valid, if any.")
    demonstrator: str = option("", "Expert as 'module:Class', for a warm start and `tiny`; created with a seed.")

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of tasks of each split."""
        return {"train": self.train_tasks, "iid": self.test_tasks}

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the task ids of a split."""
        self.check_split(split)
        return [f"{split}/{number}" for number in range(self.sizes[split])]

    def make_expert(self, seed: int = 0) -> Expert:
        """Creates the expert that the settings name."""
        player: Expert = named_object("demonstrator", self.demonstrator, "'module:Class' of an expert")(seed)
        return player


class NumberedEnv(TextEnv):
    """Tracks the score of an episode, and builds `info` from the environment's fields."""

    def __init__(self, given: NumberedArguments) -> None:
        self.given, self._running = given, False

    def _seed(self, options: Mapping[str, Any] | None) -> tuple[int, dict[str, Any]]:
        """Ends the episode, and returns the seed of the next task and the other options."""
        self._running, rest = False, dict(options or {})
        rest.pop("state_key", None)  # which these environments do not give
        split, number = split_task_id(rest.pop("task_id", None), self.given.sizes)
        return FIRST_SEED[split] + number, rest

    def _begin(self, state: Mapping[str, Any]) -> Info:
        """Starts an episode and returns its info."""
        self._running, self._score = True, 0.0
        self._task = self.given.task_text or str(state.get("task") or self.given.name)
        self._task_type = str(state.get("task_type") or self.given.name)
        self._lists = state.get(self.given.actions_key) is not None
        return self._info(state, accepted=True, over=False)

    def _check_running(self) -> None:
        if not self._running:
            raise EnvError(NOT_RUNNING)

    def _go_on(
        self, state: Mapping[str, Any], reward: float, *, terminated: bool, truncated: bool
    ) -> tuple[float, bool, bool, Info]:
        """Records a step of the environment and returns all but the observation.

        A truncated episode whose task is solved counts as terminated.
        """
        self._score += reward
        over = terminated or truncated
        self._running = not over
        info = self._info(state, accepted=_flag(state, self.given.accepted_key, default=True), over=over)
        terminated = terminated or info["won"]
        return reward, terminated, truncated and not terminated, info

    def _info(self, state: Mapping[str, Any], *, accepted: bool, over: bool, refusal: str = "") -> Info:
        given = self.given
        listed = state.get(given.actions_key)
        if isinstance(listed, str):
            raise EnvError(f"actions_key: expected the name of a list, got {given.actions_key!r}: {listed!r:.100}")
        actions = (str(action).strip() for action in (() if listed is None else listed))
        reached, score = reaches(self._score, given.won_score), state.get("score")
        return {
            "admissible_actions": tuple(dict.fromkeys(filter(None, actions))) if self._lists else None,
            "accepted": accepted,
            "refusal": refusal,
            "won": over and _flag(state, given.won_key, default=reached),
            "task": self._task,
            "task_type": self._task_type,
            "score": score if isinstance(score, Real) else self._score,
        }


def shown(text: Any) -> str:
    """Returns an observation as text that is not blank."""
    return str(text) if str(text).strip() else "(nothing)"


def _flag(state: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """Returns a field as a bool; the default for a missing one or `None`, which a server's optional fields are.

    Gymnasium's environments give numbers too. A text is an error: "False" is true in Python.
    """
    value = state.get(key)
    return default if value is None else bool(value) if isinstance(value, Real) else flag(key, value)
