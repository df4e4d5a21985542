"""Environments. Importing this package loads neither torch nor a game."""

from epo_trl.envs.base import EnvError, Expert, TaskSuite, TextEnv, split_task_id

__all__ = ["EnvError", "Expert", "TaskSuite", "TextEnv", "split_task_id"]
