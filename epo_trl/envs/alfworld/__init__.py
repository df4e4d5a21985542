"""ALFWorld: household tasks as text, in a fast engine written for this package and in TextWorld's engine."""

from epo_trl.envs.alfworld.alfworld_suite import AlfworldData, GeneratedAlfworld
from epo_trl.envs.alfworld.env import AlfworldEnv
from epo_trl.envs.alfworld.expert import AlfworldExpert

__all__ = ["AlfworldData", "AlfworldEnv", "AlfworldExpert", "GeneratedAlfworld"]
