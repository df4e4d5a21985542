"""ALFWorld: household tasks as text, in a fast engine written for this package and in TextWorld's engine."""

from epo_trl.envs.alfworld.env import AlfworldEnv
from epo_trl.envs.alfworld.expert import AlfworldExpert
from epo_trl.envs.alfworld.suite import AlfworldData, GeneratedAlfworld

__all__ = ["AlfworldData", "AlfworldEnv", "AlfworldExpert", "GeneratedAlfworld"]
