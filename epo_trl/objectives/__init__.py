"""The equations of the objective as pure functions on tensors, one equation each."""

from epo_trl.objectives.aggregation import turn_mean_weights, turn_means
from epo_trl.objectives.gae import value_loss
from epo_trl.objectives.history import EntropyHistory
from epo_trl.objectives.schedules import check_schedule, scheduled_weight
from epo_trl.objectives.smoothing import band_shares, beta_schedule, falling_beta, smoothing_penalty

__all__ = [
    "EntropyHistory",
    "band_shares",
    "beta_schedule",
    "check_schedule",
    "falling_beta",
    "scheduled_weight",
    "smoothing_penalty",
    "turn_mean_weights",
    "turn_means",
    "value_loss",
]
