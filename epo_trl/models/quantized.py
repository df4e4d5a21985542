"""A base in 4 or 8 bit under an adapter (QLoRA, arXiv 2305.14314), through TRL's fields and bitsandbytes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from trl import ModelConfig, get_quantization_config


def quantization_of(model_args: ModelConfig) -> Any:
    """Returns transformers' `BitsAndBytesConfig`, or `None` if the weights are to be as they are.

    Args:
        model_args: Its `load_in_4bit` and `load_in_8bit` ask for it; `dtype` is what is computed in.

    Raises:
        ValueError: If bitsandbytes is not installed, or `dtype` is no type to compute in.
    """
    asked = "load_in_4bit" if model_args.load_in_4bit else "load_in_8bit" if model_args.load_in_8bit else ""
    if not asked:
        return None
    if find_spec("bitsandbytes") is None:
        raise ValueError(
            f"{asked}: got True, but bitsandbytes is not installed; pip install 'epo-trl[qlora]', or leave it out"
        )
    if not isinstance(getattr(torch, str(model_args.dtype), None), torch.dtype):
        raise ValueError(f"dtype: expected 'bfloat16', 'float16' or 'float32', got {model_args.dtype!r} with {asked}")
    return get_quantization_config(model_args)
