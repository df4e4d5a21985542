"""Training methods: credit assignment, entropy control, changes to the policy loss. One file per method."""

from epo_trl.methods.base import Batch, Credit, Group, Method, MicroBatch, Need, Ranks, Shaped, StepSummary
from epo_trl.methods.registry import METHODS, as_names, methods_of
from epo_trl.methods.stack import Methods

__all__ = [
    "METHODS",
    "Batch",
    "Credit",
    "Group",
    "Method",
    "Methods",
    "MicroBatch",
    "Need",
    "Ranks",
    "Shaped",
    "StepSummary",
    "as_names",
    "methods_of",
]
