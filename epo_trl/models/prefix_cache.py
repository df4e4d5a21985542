"""A KV cache with preallocated memory, and its reuse for prompts that extend those of earlier `generate` calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer
from transformers.generation.utils import ALL_CACHE_NAMES

from epo_trl.changed import changed
from epo_trl.devices import to_device

CACHE = ALL_CACHE_NAMES[0]  # transformers' name of the argument: `past_key_values`, from 5.24 on `cache`


class PrefixCache:
    """Replaces a model's `generate` and keeps the keys and values of the last call.

    In concatenated context the prompt of a turn is the previous prompt, the response to it, and new tokens. Only the
    new tokens are computed. Rows of ended episodes are dropped. If a row does not extend a row of the last call (in the
    same order), or more than half of the kept positions are padding, everything is recomputed.

    The keys and values belong to the weights that computed them: create a new cache when the weights change. For the
    model see `can_reuse`. Without `reuse`, no call is kept.
    """

    def __init__(self, model: Any, reuse: bool = True) -> None:
        self._generate = model.generate
        self._reuse = reuse
        self._last: _Call | None = None
        self.reused = 0  # tokens that were not recomputed, over all calls

    def generate(self, *, input_ids: Tensor, attention_mask: Tensor, generation_config: Any, **kwargs: Any) -> Tensor:
        """Returns (N, P + R) ids for (N, P) ids, padded on the left, the same as the model's own `generate`."""
        if not self._reuse:
            return self._generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=generation_config,
                **{CACHE: growing_cache(), **kwargs},
            )
        # Ids and masks are compared on the CPU, which costs one copy before and one after the call.
        device, (prompts, real) = input_ids.device, torch.stack([input_ids, attention_mask]).cpu()
        before, self._last = self._last, None
        kept = None if before is None else before.rows_before(prompts, real)
        if before is None or kept is None:
            before = None  # frees its memory now
            cache, ids, mask = growing_cache(), prompts, real
        else:
            cache, ids, mask = before.cache, before.ids[kept], before.mask[kept]
            cache.batch_select_indices(to_device(kept, device))
            self.reused += int(mask.sum())
            new = real.sum(1) - mask.sum(1)
            width = int(new.max())
            fresh = torch.arange(width) >= width - new.unsqueeze(1)
            # The prompts end at the same column, so their last `width` columns hold the new tokens, right-aligned.
            ids = torch.cat([ids, prompts[:, -width:]], dim=1)
            mask = torch.cat([mask, fresh.to(mask.dtype)], dim=1)
        output = self._generate(
            input_ids=to_device(ids, device),
            attention_mask=to_device(mask, device),
            generation_config=generation_config,
            **{CACHE: cache, **kwargs},
        )[:, ids.shape[1] :]
        response = output.cpu()
        is_end = torch.isin(response, torch.tensor(generation_config.eos_token_id).flatten()).long()
        before_end = is_end.cumsum(1) == is_end  # true up to and including the first end token
        ids, mask = torch.cat([ids, response], dim=1), torch.cat([mask, before_end.to(mask.dtype)], dim=1)
        # The last column has been sampled but not computed, except under ZeRO-3 and FSDP: there a rank whose responses
        # have ended computes until those of the others have too, and its cache grows by a column in each pass.
        if (surplus := cache.get_seq_length() - ids.shape[1] + 1) > 0:
            cache.crop(-surplus)
        self._last = _Call(cache, ids[:, :-1], mask[:, :-1])
        return torch.cat([input_ids, output], dim=1)


@dataclass
class _Call:
    """What a `generate` call leaves behind: its cache, and on the CPU (N, L) ids with padding between turns."""

    cache: Cache
    ids: Tensor
    mask: Tensor

    def rows_before(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor | None:
        """Returns the row that each prompt extends, or `None` if everything must be recomputed."""
        known = [ids[mask.bool()] for ids, mask in zip(self.ids, self.mask, strict=True)]
        rows: list[int] = []
        candidates = iter(range(len(known)))
        for prompt, real in zip(input_ids, attention_mask, strict=True):
            tokens = prompt[real.bool()]
            row = next((row for row in candidates if _extends(tokens, known[row])), None)
            if row is None:
                return None
            rows.append(row)
        is_mostly_padding = self.mask.shape[1] > 2 * max(len(known[row]) for row in rows)
        return None if is_mostly_padding else torch.tensor(rows)


def _extends(tokens: Tensor, known: Tensor) -> bool:
    return len(known) < len(tokens) and torch.equal(known, tokens[: len(known)])


# Generation settings that depend only on the scores of the next token, or count new tokens. Others depend on the whole
# sequence, which has padding between turns, or need their own cache.
_HARMLESS = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "max_new_tokens", "min_new_tokens", "suppress_tokens", "renormalize_logits", "remove_invalid_values",
    "bos_token_id", "eos_token_id", "pad_token_id", "disable_compile", "transformers_version", "_from_model_config",
    "max_length",  # from a model's own settings; `max_new_tokens` takes precedence
}  # fmt: skip
_NEUTRAL = {"use_cache": True, "repetition_penalty": 1.0, "num_beams": 1, "num_return_sequences": 1}


def can_reuse(model: Any, generation_config: Any) -> bool:
    """Whether reuse gives the same result as generation from the start, for this model and these settings.

    Every layer must use full attention; other layers keep only part of the keys and values, or other states. Keys must
    depend on a token's position alone: LongRoPE's change with the length of the sequence, and MPT counts padding. Unset
    settings default to the model's own.
    """
    config = model.config.get_text_config()
    shared = getattr(config, "rope_parameters", None) or {}
    ropes = [shared, *(rope for rope in shared.values() if isinstance(rope, dict))]  # of all layers, or by their type
    has_longrope = any(rope.get("rope_type") == "longrope" for rope in ropes)
    if getattr(model, "_is_stateful", False) or config.model_type == "mpt" or has_longrope:
        return False
    if not all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers):
        return False
    settings: dict[str, Any] = {}
    for config in (model.generation_config, generation_config):
        settings |= {name: value for name, value in config.to_dict().items() if value is not None}
    return all(name in _HARMLESS or value == _NEUTRAL.get(name, False) for name, value in settings.items())


@contextmanager
def reusing_prefixes(model: Any, reuse: bool = True) -> Iterator[PrefixCache]:
    """Makes a model's `generate` that of a `PrefixCache` until the end of the block; one of its own is restored."""
    cache = PrefixCache(model, reuse)
    with changed(model, generate=cache.generate):
        yield cache


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, (N, heads, tokens, head size), as the first tokens of a larger block of memory.

    transformers' own cache copies everything for each new token. Here a full block is replaced by one with room for a
    quarter more tokens, so each token is copied only a few times.
    """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Starts without a block."""
        super().lazy_initialization(key_states, value_states)
        self._blocks: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends the keys and values of new tokens and returns all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self.get_seq_length()
        after = before + key_states.shape[-2]
        keys, values = self._blocks_for(before, after, key_states, value_states)
        keys[..., before:after, :], values[..., before:after, :] = key_states, value_states
        self.keys, self.values = keys[..., :after, :], values[..., :after, :]
        return self.keys, self.values

    def _blocks_for(self, before: int, after: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        blocks = self._blocks
        if blocks is not None:
            # Selecting or repeating rows creates keys and values that are no longer part of the blocks.
            is_view = before == 0 or self.keys.data_ptr() == blocks[0].data_ptr()
            if is_view and blocks[0].shape[0] == key_states.shape[0] and after <= blocks[0].shape[-2]:
                return blocks
        room = after + after // 4 + 64
        keys, values = (
            states.new_empty(*states.shape[:-2], room, states.shape[-1]) for states in (key_states, value_states)
        )
        if before:
            keys[..., :before, :], values[..., :before, :] = self.keys, self.values
        self._blocks = keys, values
        return keys, values


def growing_cache() -> Cache:
    """Creates an empty cache for a model with full attention in every layer."""
    return Cache(layer_class_to_replicate=GrowingLayer)
