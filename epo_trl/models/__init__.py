"""Models that need no download, and how any model is loaded."""

from epo_trl.models.load import load_policy, load_tokenizer, merge_adapter, policy_for_training
from epo_trl.models.tiny import FAMILIES, build_model, build_tokenizer

__all__ = [
    "FAMILIES",
    "build_model",
    "build_tokenizer",
    "load_policy",
    "load_tokenizer",
    "merge_adapter",
    "policy_for_training",
]
