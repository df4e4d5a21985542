"""Trainers on top of TRL."""

from epo_trl.trainers.config import EPOConfig
from epo_trl.trainers.epo_trainer import EPOTrainer

__all__ = ["EPOConfig", "EPOTrainer"]
