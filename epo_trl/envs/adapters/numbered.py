"""What Gymnasium's and OpenEnv's environments have in common: tasks are numbers, and what they say has names.

A task is a seed: `train/17` is seed 17, `iid/17` is seed 1,000,017. What the environment says beside the observation
(Gymnasium's info, OpenEnv's observation) is read by the names in the settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from epo_trl.envs.adapters import reaches
from epo_trl.envs.base import EnvError, Expert, Info, TaskSuite, TextEnv
from epo_trl.envs.named import named_object

SPLITS = ("train", "iid")
FIRST_SEED = {"train": 0, "iid": 1_000_000}
NO_ACTION = "This is not an action here."


@dataclass
class NumberedArguments:
    """Tasks that are seeds, and the names by which the environment says how things stand."""

    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset(["test_tasks", "demonstrator"])

    task_text: str = field(
        default="", metadata={"help": "The task in words; by default what the environment calls `task`, or its name."}
    )
    train_tasks: int = field(default=1000, metadata={"help": "Training seeds: 0, 1, 2, ..."})
    test_tasks: int = field(default=100, metadata={"help": "Seeds of the list `iid`: 1000000, 1000001, ..."})
    won_key: str = field(
        default="is_success", metadata={"help": "Name of what says at the end whether the task is solved."}
    )
    won_score: float | None = field(
        default=1.0,
        metadata={"help": "Where nothing of that name is said: solved if the rewards sum to so much; null: never."},
    )
    actions_key: str = field(
        default="admissible_actions", metadata={"help": "Name of the list of what can be done now, if there is one."}
    )
    accepted_key: str = field(
        default="accepted", metadata={"help": "Name of what says whether the last action was one, if it is said."}
    )
    demonstrator: str = field(
        default="", metadata={"help": "'module:Class' of an expert, for a warm start and `tiny`; made with a seed."}
    )

    def check(self) -> None:
        """Raises `EnvError` if there would be no tasks."""
        for name in ("train_tasks", "test_tasks"):
            if not 1 <= getattr(self, name) <= FIRST_SEED["iid"]:
                raise EnvError(f"{name}: got {getattr(self, name)}, takes an integer from 1 to {FIRST_SEED['iid']}")


class NumberedSuite(TaskSuite):
    """Seeds as tasks. Derive from it and write `make_env`.

    Args:
        given: The settings.
        name: Of the suite.
    """

    splits = SPLITS
    verbatim = True

    def __init__(self, given: NumberedArguments, name: str) -> None:
        given.check()
        self.given, self.name = given, "".join(letter if letter.isalnum() else "-" for letter in name)

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the task ids of a split."""
        self.check_split(split)
        count = self.given.train_tasks if split == "train" else self.given.test_tasks
        return [f"{split}/{number}" for number in range(count)]

    def make_expert(self, seed: int = 0) -> Expert:
        """Returns the player that the settings name.

        Raises:
            EnvError: If they name none.
        """
        if not self.given.demonstrator:
            raise EnvError(f"demonstrator: got none, takes 'module:Class': {self.name!r} has no expert of its own")
        player: Expert = named_object("demonstrator", self.given.demonstrator, "'module:Class'")(seed)
        return player


class NumberedEnv(TextEnv):
    """Keeps the score of an episode, and makes `info` of what the environment says.

    Args:
        given: The settings.
        name: Of the suite.
    """

    def __init__(self, given: NumberedArguments, name: str) -> None:
        self.given, self.name = given, name
        self._running = False

    def _seed(self, options: Mapping[str, Any] | None) -> tuple[int, dict[str, Any]]:
        """Returns the seed of the task, and the other options."""
        rest = dict(options or {})
        task_id = rest.pop("task_id", None)
        split, _, number = str(task_id).partition("/")
        limits = {"train": self.given.train_tasks, "iid": self.given.test_tasks}
        if split not in limits or not number.isdecimal() or int(number) >= limits[split]:
            raise EnvError(f'options["task_id"]: got {task_id!r:.100}, takes an id of the suite, such as "train/0"')
        return FIRST_SEED[split] + int(number), rest

    def _begin(self, said: Mapping[str, Any]) -> Info:
        """Returns the info of a new episode."""
        self._running, self._score = True, 0.0
        self._task = self.given.task_text or str(said.get("task") or self.name)
        self._task_type = str(said.get("task_type") or self.name)
        self._lists = said.get(self.given.actions_key) is not None
        return self._info(said, accepted=True, over=False)

    def _check_running(self) -> None:
        if not self._running:
            raise EnvError("step: no episode is running; call reset(options={'task_id': ...}) first")

    def _go_on(self, said: Mapping[str, Any], reward: float, *, terminated: bool, truncated: bool) -> Info:
        """Returns the info after a step of the environment."""
        self._score += reward
        self._running = not (terminated or truncated)
        accepted = bool(said.get(self.given.accepted_key, True))
        return self._info(said, accepted=accepted, over=terminated)

    def _info(self, said: Mapping[str, Any], *, accepted: bool, over: bool, refusal: str = "") -> Info:
        given = self.given
        listed = [text for action in said.get(given.actions_key) or () if (text := str(action).strip())]
        reached = reaches(self._score, given.won_score)
        return {
            "admissible_actions": tuple(dict.fromkeys(listed)) if self._lists else None,
            "accepted": accepted,
            "refusal": refusal,
            "won": over and bool(said.get(given.won_key, reached)),
            "task": self._task,
            "task_type": self._task_type,
            "score": self._score,
        }
