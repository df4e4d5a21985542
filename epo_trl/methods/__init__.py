"""Training methods: credit assignment, entropy control, changes to the policy loss. One file per method."""

from epo_trl.methods.base import Batch, Comm, Credit, Group, Method, MicroBatch, ModifiedAdvantages, Need, StepSummary
from epo_trl.methods.registry import METHODS, as_names, build_methods
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
    "Comm",
    "ModifiedAdvantages",
    "StepSummary",
    "as_names",
    "build_methods",
]
