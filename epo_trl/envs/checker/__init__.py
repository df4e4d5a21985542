"""Checks an environment against the contract of `envs/base.py`; each message says what is wrong and how to mend it."""

from epo_trl.envs.checker.env import Player, check_first_turn, check_text_env
from epo_trl.envs.checker.error import EnvCheckError
from epo_trl.envs.checker.suite import check_task_suite

__all__ = ["EnvCheckError", "Player", "check_first_turn", "check_task_suite", "check_text_env"]
