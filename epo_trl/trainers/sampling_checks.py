"""Checks before training of how responses are sampled."""

from __future__ import annotations

import warnings
from typing import Any

from epo_trl.errors import InputError
from epo_trl.models.generate import narrowing
from epo_trl.rollout import ContextBuilder
from epo_trl.trainers.config import EPOConfig

# Values that leave the model's distribution unchanged; the first one is recommended.
_OFF: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, None, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
    "vllm_structured_outputs_regex": (None,),
}
_FIXED: dict[str, Any] = {
    **{"do_sample": True, "num_beams": 1, "num_return_sequences": 1, "n": 1, "return_dict_in_generate": False},
    **dict.fromkeys(("eos_token_id", "stop_token_ids", "stop", "stop_strings")),
}
_REFUSED = {
    "seed": "vLLM would sample the same response for every member of a group, and transformers would ignore it. Set "
    "seed, or request_seeds for a seed per response.",
    "logprobs": "vLLM would return the log-probability of another token than the sampled one.",
}


def check_sampling(args: EPOConfig) -> None:
    """Raises `InputError` if `generation_kwargs` bypass a setting; warns if sampling is not from the full distribution.

    The loss must know how responses were sampled, so each of these settings has one place.
    """
    own = {name: name for name in (*_OFF, "temperature", "cache_implementation")}
    own |= dict.fromkeys(("max_new_tokens", "max_tokens", "max_length"), "max_completion_length")
    given: dict[str, Any] = args.generation_kwargs or {}
    for name, value in given.items():
        if name in own and value != getattr(args, own[name]):
            raise InputError(
                f"generation_kwargs: expected no {name}, got {name}={value!r}. It would override {own[name]} "
                f"({getattr(args, own[name])!r}), which the loss assumes. Set {own[name]} instead."
            )
        if name in _REFUSED:
            raise InputError(f"generation_kwargs: expected no {name}, got {name}={value!r}. {_REFUSED[name]}")
        if name in _FIXED and value != _FIXED[name]:
            raise InputError(
                f"generation_kwargs: expected no {name}, got {name}={value!r}. The loss is that of one sampled "
                "response per prompt, which ends at the model's own end tokens."
            )
    off = {name: values[0] for name, values in _OFF.items() if getattr(args, name) not in values}
    others = narrowing(given)
    if (off or others) and args.process_index == 0:
        got = [getattr(args, name) for name in off] + [given[name] for name in others]
        fixes = ["set " + ", ".join(f"{name}={value}" for name, value in off.items())] if off else []
        fixes += [f"remove {', '.join(others)} from generation_kwargs"] if others else []
        warnings.warn(
            f"{', '.join([*off, *others])}: got {', '.join(map(str, got))}, so responses come from a different "
            "distribution than the loss and the entropy terms assume. Log-probabilities differ, and the entropy bonus "
            f"includes tokens that cannot be sampled. For training, {' and '.join(fixes)}",
            stacklevel=3,
        )


def warn_empty_thought(args: EPOConfig, context: ContextBuilder) -> None:
    """Warns if reasoning is required but the chat template closes the reasoning block before the response."""
    if args.require_think and context.has_empty_thought and args.process_index == 0:
        warnings.warn(
            "require_think: got True, but the chat template starts every answer with an empty <think> </think> block. "
            "All actions of a model that does not think again after it are invalid. Set require_think=False, or turn "
            "thinking on, for most models with chat_template_kwargs={'enable_thinking': True}.",
            stacklevel=3,
        )
