"""Models that need no download."""

from epo_trl.models.tiny import FAMILIES, build_model, build_tokenizer

__all__ = ["FAMILIES", "build_model", "build_tokenizer"]
