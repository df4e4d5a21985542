"""What can be known to be wrong before training starts."""

from __future__ import annotations

from typing import Any

from accelerate.utils import is_peft_model

from epo_trl.trainers.config import EPOConfig


def check_tokenizer(tokenizer: Any) -> None:
    """Raises `ValueError` if the tokenizer cannot mark padding or the end of a turn."""
    for token in ("pad_token", "eos_token"):
        if getattr(tokenizer, token, None) is None:
            raise ValueError(
                f"processing_class: the tokenizer has no {token}; set one that is not used for anything else, for "
                f"example `tokenizer.{token} = '<|endoftext|>'` for a Qwen model"
            )


def check_reference(args: EPOConfig, model: Any, peft_config: Any) -> None:
    """Raises `ValueError` if TRL is to load a reference model from a path that the model does not have."""
    if not args.beta or isinstance(model, str) or peft_config is not None or is_peft_model(model):
        return
    if not model.config._name_or_path:
        raise ValueError(
            f"beta: got {args.beta}, for which the reference model is loaded from where the policy came from, but this "
            "model was made in memory; save the model and pass its path, or set beta=0"
        )


def check_context_fits(args: EPOConfig, model_config: Any) -> int | None:
    """Returns the longest sequence that the model takes, in tokens, or `None` if it has no limit.

    Raises:
        ValueError: If one turn (windowed), or `max_turns` responses after the first prompt (concatenated), cannot fit.
    """
    limits = {
        "max_position_embeddings": getattr(model_config.get_text_config(), "max_position_embeddings", None),
        "vllm_max_model_length": args.vllm_max_model_length if args.use_vllm else None,
    }
    known = {name: limit for name, limit in limits.items() if limit is not None}
    if not known:
        return None
    name = min(known, key=lambda key: known[key])
    turns = args.max_turns if args.context == "concatenated" else 1
    needed = args.max_prompt_length + turns * args.max_completion_length
    if needed > known[name]:
        per_turn = f"{turns} x " if turns > 1 else ""
        advice = "max_prompt_length, max_completion_length"
        if turns > 1:
            advice += " or max_turns, or take context='windowed'"
        raise ValueError(
            f"max_turns, max_prompt_length, max_completion_length: {args.context} context needs at least "
            f"{args.max_prompt_length} + {per_turn}{args.max_completion_length} = {needed} tokens, but {name} is "
            f"{known[name]}; lower {advice}"
        )
    return known[name]
