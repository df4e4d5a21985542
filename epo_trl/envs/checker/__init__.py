"""Checks an environment against the contract of `envs/base.py`. Each message names the problem and the fix."""

from epo_trl.envs.checker.env import Player, check_task_suite, check_text_env
from epo_trl.envs.checker.results import EnvCheckError

__all__ = ["EnvCheckError", "Player", "check_task_suite", "check_text_env"]
