"""Tiny models built from scratch, and loading of any model. Imports torch when one of its names is first used."""

from typing import TYPE_CHECKING

from epo_trl.lazy import load_on_use

if TYPE_CHECKING:
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

_LOAD, _TINY = "epo_trl.models.load", "epo_trl.models.tiny"
__getattr__ = load_on_use(
    __name__,
    {
        "FAMILIES": _TINY,
        "build_model": _TINY,
        "build_tokenizer": _TINY,
        "load_policy": _LOAD,
        "load_tokenizer": _LOAD,
        "merge_adapter": _LOAD,
        "policy_for_training": _LOAD,
    },
)
