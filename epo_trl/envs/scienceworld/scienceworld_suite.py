"""The ScienceWorld task suite: fixed task lists, and environments that share JVMs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epo_trl.envs.base import EnvError, Faults, TaskSuite
from epo_trl.envs.scienceworld.env import EngineRules, ScienceWorldEnv
from epo_trl.envs.scienceworld.expert import GoldExpert, focused
from epo_trl.envs.scienceworld.gold import GoldPaths, GoldSettings
from epo_trl.envs.scienceworld.host import Host, JvmSettings
from epo_trl.envs.scienceworld.tasks import TaskLists, check_simplification, has_teleport

_TASKS_AT_ONCE = 100


class ScienceWorldSuite(TaskSuite):
    """ScienceWorld's tasks: "train", "iid" and "ood" variations of the same task types, and "heldout" types.

    "train" lists a task more than once if its type has few variations, see `TaskLists`.

    Args:
        lists: Task lists.
        rules: Settings of play on the engine.
        jvm: Settings of the JVMs.
        jvms: Number of JVM processes, each driven by its own thread. They run in parallel when environments are stepped
            with `step_async`, as in the rollout; more JVMs than cores do not help. Python's share of a step is a tenth,
            so one Python process can keep several JVMs busy.
        gold: Settings of the gold paths' cache and generation.
        teleport_rate: Probability that the expert teleports where a gold path walks from room to room.
        guess_rate: Probability that the expert, where a gold path focuses on something, focuses instead on any object
            in reach that the path of some training task focuses on. 1 teaches the form of play but not the right
            choices.

    Raises:
        EnvError: If a setting is invalid, or Java is missing.
    """

    name = "scienceworld"
    protocol = "strict30"
    prompt_template = "scienceworld"

    def __init__(
        self,
        lists: TaskLists | None = None,
        rules: EngineRules | None = None,
        jvm: JvmSettings | None = None,
        jvms: int = 1,
        gold: GoldSettings | None = None,
        teleport_rate: float = 0.0,
        guess_rate: float = 0.0,
    ) -> None:
        if jvms < 1:
            raise EnvError(f"jvms: expected an integer >= 1, got {jvms}")
        for field, rate in (("guess_rate", guess_rate), ("teleport_rate", teleport_rate)):
            if not 0 <= rate <= 1:
                raise EnvError(f"{field}: expected a number in [0, 1], got {rate}")
        self.lists, self.rules = lists or TaskLists(), rules or EngineRules()
        self.jvm, self.jvms = jvm or JvmSettings(), jvms
        self.splits = tuple(self.lists.ids)
        check_simplification(self.rules.simplification, self.lists.played_types)
        if teleport_rate and not has_teleport(self.rules.simplification):
            raise EnvError(
                f"teleport_rate: expected 0 with simplification {self.rules.simplification!r}, got {teleport_rate}: "
                "only 'easy' and 'teleportAction' let an agent teleport"
            )
        self._gold = GoldPaths(self.rules.simplification, gold or GoldSettings(), self.jvm)
        self._teleport_rate, self._guess_rate = teleport_rate, guess_rate
        self._choices: frozenset[str] = frozenset()
        self._hosts = self._make_hosts()

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the task ids of a split."""
        self.check_split(split)
        return self.lists.ids[split]

    def make_env(self) -> ScienceWorldEnv:
        """Creates a fresh environment on the JVM that serves the fewest."""
        return ScienceWorldEnv(min(self._hosts, key=len), self.lists, self.rules)

    def make_expert(self, seed: int = 0) -> GoldExpert:
        """Creates an expert that plays gold paths, which use full knowledge of the world; `seed` decides its guesses.

        A path that is not in the cache is generated when it is needed; `demonstration_tasks` generates many at once.
        """
        if self._guess_rate and not self._choices:
            tasks = sorted(set(map(self.lists.find, self.task_ids("train"))))
            self._gold.generate(tasks)
            self._choices = frozenset().union(*(focused(self._gold.path(*task).actions) for task in tasks))
        return GoldExpert(
            lambda task_id: self._gold.path(*self.lists.find(task_id)).actions,
            self._teleport_rate,
            self._guess_rate,
            self._choices,
            seed,
        )

    def demonstration_tasks(self, split: str, max_turns: int, count: int | None = None) -> list[str]:
        """Returns the tasks of a split that the gold path solves in time, each once, in the order of the list.

        Args:
            split: Name of the split.
            max_turns: Turn limit of the protocol.
            count: Maximum number of tasks. Paths are generated, at 0.1 to 5 s each, until that many are found.
        """
        found: list[str] = []
        ids = list(dict.fromkeys(self.task_ids(split)))
        with self._gold.kept_jvms():
            for first in range(0, len(ids), _TASKS_AT_ONCE):
                part = ids[first : first + _TASKS_AT_ONCE]
                self._gold.generate(map(self.lists.find, part))
                found += [name for name in part if 0 < self._gold.path(*self.lists.find(name)).turns <= max_turns]
                if count is not None and len(found) >= count:
                    break
        return found[:count]

    def faults(self) -> Faults:
        """Returns the failure counts of the JVMs so far."""
        return sum((host.faults() for host in self._hosts), Faults())

    def _make_hosts(self) -> list[Host]:
        return [Host(self.jvm) for _ in range(self.jvms)]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hosts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hosts = self._make_hosts()
