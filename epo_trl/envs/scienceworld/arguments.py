"""Settings of ScienceWorld for recipes and configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from epo_trl.bounds import Count, Share, copy_options, option
from epo_trl.envs.scienceworld.env import EngineRules
from epo_trl.envs.scienceworld.gold import GoldSettings
from epo_trl.envs.scienceworld.host import JvmSettings
from epo_trl.envs.scienceworld.scienceworld_suite import ScienceWorldSuite
from epo_trl.envs.scienceworld.tasks import TaskLists


@dataclass
class ScienceWorldArguments(EngineRules, JvmSettings, GoldSettings):
    """The choice of ScienceWorld tasks and rules."""

    # Settings that a resumed run may change: they do not change what is learned.
    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset(
        "n_iid n_ood n_heldout jvms java heap_mb timeout_seconds gold_folder gold_workers".split()
    )

    task_types: list[str] | None = option(
        None, "Task types to train and test on; all but the held-out ones by default."
    )
    heldout_types: list[str] | None = option(
        None, "Task types of the split 'heldout' only; five by default, none with an empty list."
    )
    sampling: str = option(
        "types", "'types': training draws all task types equally often; 'variations': all variations."
    )
    tests_per_type: int = option(10, "Maximum number of tasks per type in a test list, up to 75; some have fewer.")
    n_iid: int | None = option(None, "Number of test tasks; by default tests_per_type of each task type.")
    n_ood: int | None = option(None, "Like n_iid, for unseen variations.")
    n_heldout: int | None = option(None, "Like n_iid, for held-out task types.")
    jvms: Count = option(1, "Number of Java processes that share the worlds; one per core.")
    teleport_rate: Share = option(
        0.0,
        "Share of the expert's walks between rooms that one 'teleport to' replaces. Must be 0 where the "
        "simplifications have no teleportAction ('easy' has it).",
    )
    guess_rate: Share = option(
        0.0,
        "Share of the demonstrations in which the expert focuses on any object in reach that some training task asks "
        "for. They teach the form of play; `keep_lost` keeps those that lose.",
    )

    def make_suite(self) -> ScienceWorldSuite:
        """Creates the task suite.

        Raises:
            EpoTrlError: If a field is invalid, or Java is missing.
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
            copy_options(EngineRules, self),
            copy_options(JvmSettings, self),
            self.jvms,
            copy_options(GoldSettings, self),
            self.teleport_rate,
            self.guess_rate,
        )
