"""Credit assignment: which token gets how much of the outcome."""

from epo_trl.advantages.credit import CreditBatch, share_episode_advantage
from epo_trl.advantages.gae import CREDITS, Estimate, ValueBatch

__all__ = ["CREDITS", "CreditBatch", "Estimate", "ValueBatch", "share_episode_advantage"]
