"""Credit assignment: which token gets how much of the outcome."""

from epo_trl.advantages.credit import CreditBatch, share_episode_advantage

__all__ = ["CreditBatch", "share_episode_advantage"]
