"""Tiny models built from scratch, and loading of any model. Imports torch when one of its names is first used."""

from typing import TYPE_CHECKING

from epo_trl.lazy import load_on_use

if TYPE_CHECKING:
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

__getattr__ = load_on_use(
    __name__,
    {
        "epo_trl.models.load": ["load_policy", "load_tokenizer", "merge_adapter", "policy_for_training"],
        "epo_trl.models.tiny": ["build_model", "build_tokenizer"],
    },
)
