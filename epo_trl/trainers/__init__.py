"""Trainers built on TRL."""

from epo_trl.trainers.config import EPOConfig
from epo_trl.trainers.epo_trainer import EPOTrainer
from epo_trl.trainers.ppo_config import EPOPPOConfig
from epo_trl.trainers.ppo_trainer import EPOPPOTrainer
from epo_trl.trainers.trl_environment import as_environment_factory, task_dataset

__all__ = ["EPOConfig", "EPOPPOConfig", "EPOPPOTrainer", "EPOTrainer", "as_environment_factory", "task_dataset"]
