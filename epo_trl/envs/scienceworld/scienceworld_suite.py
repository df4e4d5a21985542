"""The ScienceWorld task suite: fixed task lists, and environments that share JVMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from epo_trl.bounds import copy_options
from epo_trl.envs.base import EnvError, Faults, TaskSuite
from epo_trl.envs.scienceworld.env import EngineRules, ScienceWorldEnv
from epo_trl.envs.scienceworld.expert import GoldExpert
from epo_trl.envs.scienceworld.gold import GoldPaths, GoldSettings
from epo_trl.envs.scienceworld.host import Host, JvmSettings
from epo_trl.envs.scienceworld.tasks import TaskLists, find_task

_TASKS_AT_ONCE = 100


@dataclass(eq=False)
class ScienceWorldSuite(TaskSuite, TaskLists, EngineRules, JvmSettings, GoldSettings):
    """ScienceWorld's tasks: "train", "iid" and "ood" variations of the same task types, and "heldout" types.

    "train" lists a task more than once if its type has few variations, see `TaskLists`.

    Each of the `jvms` processes is driven by its own thread. They run in parallel when environments are stepped with
    `step_async`, as in the rollout; more JVMs than cores do not help. Python's share of a step is a tenth, so one
    Python process can keep several JVMs busy. `EpoTrlError` if a field is invalid, or Java is missing.
    """

    # Settings that a resumed run may change: they do not change what is learned.
    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset(
        "tests_per_type n_iid n_ood jvms java heap_mb timeout_seconds gold_folder".split()
    )
    name = "scienceworld"
    protocol = "strict30"
    prompt_template = "scienceworld"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.splits = tuple(self.ids)
        chosen = set(self.simplification.split(","))
        if self.teleport_rate and chosen.isdisjoint({"easy", "teleportAction"}):
            raise EnvError(
                f"teleport_rate: expected 0 with simplification {self.simplification!r}, got {self.teleport_rate}: "
                "only 'easy' and 'teleportAction' let an agent teleport"
            )
        self._gold = GoldPaths(self.simplification, self.gold_folder, self.java)
        self._hosts = self._make_hosts()

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the task ids of a split."""
        self.check_split(split)
        return self.ids[split]

    def make_env(self) -> ScienceWorldEnv:
        """Creates a fresh environment on the JVM that serves the fewest."""
        return ScienceWorldEnv(min(self._hosts, key=len), copy_options(EngineRules, self))

    def make_expert(self, seed: int = 0) -> GoldExpert:
        """Creates an expert that plays gold paths, which use full knowledge; `seed` decides where it teleports.

        A path that is not in the cache is generated when it is needed; `demonstration_tasks` generates many at once.
        """
        return GoldExpert(lambda task_id: self._gold.path(*find_task(task_id)).actions, self.teleport_rate, seed)

    def demonstration_tasks(self, split: str, max_turns: int, count: int | None = None) -> list[str]:
        """Returns the tasks of a split that the gold path solves in time, each once, in the order of the list.

        Paths are generated, at 0.1 to 5 s each, until `count` tasks are found.
        """
        found: list[str] = []
        ids = list(dict.fromkeys(self.task_ids(split)))
        for first in range(0, len(ids), _TASKS_AT_ONCE):
            part = ids[first : first + _TASKS_AT_ONCE]
            self._gold.generate(map(find_task, part))
            found += [name for name in part if 0 < self._gold.path(*find_task(name)).turns <= max_turns]
            if count is not None and len(found) >= count:
                break
        return found[:count]

    def faults(self) -> Faults:
        """Returns the failure counts of the JVMs so far."""
        return sum((host.faults() for host in self._hosts), Faults())

    def _make_hosts(self) -> list[Host]:
        return [Host(copy_options(JvmSettings, self)) for _ in range(self.jvms)]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hosts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hosts = self._make_hosts()
