"""Tiny models built from scratch, and loading of any model."""

from epo_trl.models.load import load_policy, load_tokenizer, merge_adapter, policy_for_training
from epo_trl.models.tiny import build_model, build_tokenizer

__all__ = [
    "build_model",
    "build_tokenizer",
    "load_policy",
    "load_tokenizer",
    "merge_adapter",
    "policy_for_training",
]
