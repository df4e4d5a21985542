"""Training methods: credit assignment, entropy control, changes to the policy loss. One file per method."""

from epo_trl.methods.base import (
    Batch,
    Comm,
    Credit,
    CriticValues,
    Group,
    Method,
    MicroBatch,
    ModifiedAdvantages,
    Need,
    Selection,
    StepSummary,
    Tally,
    TokenScores,
    TurnFeatures,
)
from epo_trl.methods.registry import METHODS, build_methods
from epo_trl.methods.stack import Methods

__all__ = [
    "METHODS",
    "Batch",
    "Credit",
    "CriticValues",
    "Group",
    "Method",
    "Methods",
    "MicroBatch",
    "Need",
    "Comm",
    "ModifiedAdvantages",
    "Selection",
    "StepSummary",
    "Tally",
    "TokenScores",
    "TurnFeatures",
    "build_methods",
]
