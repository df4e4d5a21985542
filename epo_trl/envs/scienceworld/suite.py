"""The ScienceWorld task suite: fixed task lists, and environments that share JVMs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epo_trl.envs.base import EnvError, TaskSuite
from epo_trl.envs.scienceworld.env import Rules, ScienceWorldEnv
from epo_trl.envs.scienceworld.host import Host, JvmSettings
from epo_trl.envs.scienceworld.tasks import TaskLists, check_simplification


class ScienceWorldSuite(TaskSuite):
    """ScienceWorld's tasks: "train", "iid" and "ood" variations of the same task types, and "heldout" types.

    "train" names a task more than once if its type has few variations, see `TaskLists`.

    Args:
        lists: Which tasks.
        rules: How the engine is played.
        jvm: How JVMs are started.
        jvms: Number of JVM processes, each with a thread that drives it. They work side by side when environments are
            stepped with `step_async`, as the rollout does; more than there are cores bring nothing. Python's share of
            a step is a tenth, so one process can keep several busy.

    Raises:
        EnvError: If a setting is wrong, or there is no Java.
    """

    name = "scienceworld"

    def __init__(
        self,
        lists: TaskLists | None = None,
        rules: Rules | None = None,
        jvm: JvmSettings | None = None,
        jvms: int = 1,
    ) -> None:
        if jvms < 1:
            raise EnvError(f"jvms: got {jvms}, takes an integer >= 1")
        self.lists, self.rules = lists or TaskLists(), rules or Rules()
        self.jvm, self.jvms = jvm or JvmSettings(), jvms
        self.splits = tuple(self.lists.ids)
        check_simplification(self.rules.simplification, self.lists.played_types)
        self._hosts = self._make_hosts()

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the task ids of a split."""
        self.check_split(split)
        return self.lists.ids[split]

    def make_env(self) -> ScienceWorldEnv:
        """Returns a fresh environment on the JVM that serves the fewest."""
        return ScienceWorldEnv(min(self._hosts, key=len), self.lists, self.rules)

    def _make_hosts(self) -> list[Host]:
        return [Host(self.jvm) for _ in range(self.jvms)]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hosts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hosts = self._make_hosts()
