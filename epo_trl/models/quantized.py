"""Quantizes the base model to 4 or 8 bits under an adapter (QLoRA, arXiv 2305.14314), with bitsandbytes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from trl import ModelConfig, get_quantization_config

from epo_trl.errors import InputError


def build_quantization(model_args: ModelConfig) -> Any:
    """Builds transformers' `BitsAndBytesConfig`, or returns `None` without quantization.

    Args:
        model_args: Model settings: `load_in_4bit` or `load_in_8bit`, and `dtype` for computation.

    Raises:
        ValueError: If bitsandbytes is not installed, or `dtype` is not a floating-point type.
    """
    asked = "load_in_4bit" if model_args.load_in_4bit else "load_in_8bit" if model_args.load_in_8bit else ""
    if not asked:
        return None
    if find_spec("bitsandbytes") is None:
        raise InputError(
            f"{asked}: got True, but bitsandbytes is not installed; pip install 'epo-trl[qlora]', or omit {asked}"
        )
    if not isinstance(getattr(torch, str(model_args.dtype), None), torch.dtype):
        raise InputError(f"dtype: expected 'bfloat16', 'float16' or 'float32', got {model_args.dtype!r} with {asked}")
    return get_quantization_config(model_args)
