"""ScienceWorld: elementary-school science experiments as text, many worlds on one JVM."""

from epo_trl.envs.scienceworld.env import EngineRules, ScienceWorldEnv
from epo_trl.envs.scienceworld.expert import GoldExpert
from epo_trl.envs.scienceworld.scienceworld_suite import ScienceWorldSuite
from epo_trl.envs.scienceworld.tasks import TaskLists

__all__ = ["EngineRules", "GoldExpert", "ScienceWorldEnv", "ScienceWorldSuite", "TaskLists"]
