"""A policy outside a trainer: plain `generate` on lists of token ids."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from epo_trl.changed import changed
from epo_trl.devices import seeded
from epo_trl.models.prefix_cache import PrefixCache, can_reuse

# Settings besides the temperature that change the distribution, and the values that do not.
UNCHANGED = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
# Further settings of transformers and vLLM that keep it, or have a field of their own in a trainer's config.
_KEEPING = {
    *UNCHANGED, "temperature", "do_sample", "num_beams", "num_return_sequences", "n",
    "max_new_tokens", "max_tokens", "max_length", "pad_token_id", "bos_token_id",
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size",
    "disable_compile", "compile_config", "renormalize_logits", "remove_invalid_values",
    "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
}  # fmt: skip


def narrowing(settings: Mapping[str, Any]) -> list[str]:
    """Returns the names of generation settings that may exclude or favour tokens, besides those in `UNCHANGED`."""
    return [name for name, value in settings.items() if value and name not in _KEEPING]


def decoding(temperature: float) -> dict[str, Any]:
    """Returns transformers' generation settings for the full distribution at a temperature; 0 is greedy decoding."""
    if temperature:
        return {"do_sample": True, "temperature": temperature, **UNCHANGED}
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
    return {**UNCHANGED, **greedy}


class SamplingPolicy:
    """Samples responses from a model's full distribution at a temperature. Implements `epo_trl.rollout.loop.Generate`.

    Sampling settings in the checkpoint's `generation_config.json` (top_p, repetition_penalty) are ignored: they are not
    part of a protocol, and training samples without them.

    Args:
        model: Causal language model, used on its current device.
        tokenizer: Tokenizer of the model.
        max_new_tokens: Maximum length of a response.
        temperature: Sampling temperature; 0 is greedy decoding.
        seed: Seed for sampling. The global random state is unchanged.
        others: Further generation settings of transformers, such as `top_p`.
        reuse_prefixes: Whether to reuse the keys and values of each call in the next one, whose prompts extend the
            previous ones in concatenated context. Models and settings that do not allow it recompute them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        seed: int = 0,
        others: Mapping[str, Any] | None = None,
        reuse_prefixes: bool = False,
    ):
        self.model = model.eval()
        self.eos_ids = end_ids(tokenizer, model.generation_config.eos_token_id)
        self.pad_id = self.eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id  # masked anyway
        ends = {"max_new_tokens": max_new_tokens, "pad_token_id": self.pad_id, "eos_token_id": self.eos_ids}
        self.config = GenerationConfig(**{**ends, **decoding(temperature), **(others or {})})
        self._random = torch.Generator().manual_seed(seed)
        with without_own_settings(model):
            own_cache = can_reuse(model, self.config)
        self._reuse = reuse_prefixes
        self._cache = PrefixCache(model, reuse_prefixes) if own_cache else None

    def seeded(self, seed: int) -> SamplingPolicy:
        """Returns a copy of the policy with its own random generator and cache."""
        other = copy.copy(self)
        other._random = torch.Generator().manual_seed(seed)
        other._cache = PrefixCache(self.model, self._reuse) if self._cache is not None else None
        return other

    @torch.inference_mode()
    def __call__(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], None]:
        """Samples one response per prompt, including the end-of-turn token."""
        device = self.model.device
        width = max(map(len, prompt_ids))
        ids = torch.tensor([[self.pad_id] * (width - len(p)) + p for p in prompt_ids], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompt_ids], device=device)
        seed = int(torch.randint(2**62, (), generator=self._random))
        generate = self.model.generate if self._cache is None else self._cache.generate
        with seeded(seed, device), without_own_settings(self.model):
            output = generate(input_ids=ids, attention_mask=mask, generation_config=self.config)
        return [self._until_end(row) for row in output[:, width:].tolist()], None

    def _until_end(self, ids: list[int]) -> list[int]:
        ends = [index + 1 for index, token in enumerate(ids) if token in self.eos_ids]
        return ids[: ends[0]] if ends else ids


def without_own_settings(model: Any) -> AbstractContextManager[None]:
    """Hides a checkpoint's sampling settings, such as top_p, which `generate` would use as defaults."""
    owner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT models delegate to their base
    return changed(owner, generation_config=GenerationConfig())


def end_ids(tokenizer: Any, of_generation: int | list[int] | None) -> list[int]:
    """Returns the tokens that end a response: the tokenizer's, then those of the model's generation settings."""
    known = [of_generation] if isinstance(of_generation, int) else list(of_generation or [])
    return list(dict.fromkeys([tokenizer.eos_token_id, *known]))
