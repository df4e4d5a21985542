"""Generation that goes on from where the last call ended, for prompts that grow by what was said since."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from epo_trl.devices import to_device
from epo_trl.models.kv_cache import growing_cache


class PrefixCache:
    """Stands in for a model's `generate` and keeps the keys and values of what it has seen.

    In concatenated context the prompt of a turn is that of the turn before, the response to it and something new. Only
    the latter is run. A row that ended since is forgotten. If some row does not go on from a row of the call before
    (in the same order), or padding makes up more than half of what is kept, everything is run anew.

    The keys and values are those of the weights that made them: start a new one when the weights change.

    Args:
        model: A causal language model whose layers attend to everything, see `can_reuse`.
        calls: How many calls are kept to go on from; more than one if several batches take turns, 0 for prompts that
            never go on from one another.
    """

    def __init__(self, model: Any, calls: int = 1) -> None:
        self._generate = model.generate
        self._calls: deque[_Call] = deque(maxlen=calls)
        self.reused = 0  # tokens that did not have to be run again, over all calls

    def generate(self, *, input_ids: Tensor, attention_mask: Tensor, generation_config: Any, **kwargs: Any) -> Tensor:
        """Returns (N, P + R) ids as the model's own `generate` would have.

        Args:
            input_ids: (N, P), padded on the left.
            attention_mask: (N, P), 0 on padding.
            generation_config: As for the model.
            **kwargs: As for the model.
        """
        if not self._calls.maxlen:
            return self._generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                past_key_values=growing_cache(),
                generation_config=generation_config,
                **kwargs,
            )
        # All that decides what is run is looked at on the CPU, where it takes one copy before and one after.
        device, (prompts, real) = input_ids.device, torch.stack([input_ids, attention_mask]).cpu()
        before, kept = self._take(prompts, real)
        if before is None:
            cache, ids, mask = growing_cache(), prompts, real
        else:
            cache, ids, mask = before.cache, before.ids[kept], before.mask[kept]
            cache.batch_select_indices(to_device(kept, device))
            self.reused += int(mask.sum())
            new = real.sum(1) - mask.sum(1)
            width = int(new.max())
            fresh = torch.arange(width) >= width - new.unsqueeze(1)
            # The prompts end at the same column, so their last `width` columns hold what is new, after what is not.
            ids = torch.cat([ids, prompts[:, -width:]], dim=1)
            mask = torch.cat([mask, fresh.to(mask.dtype)], dim=1)
        output = self._generate(
            input_ids=to_device(ids, device),
            attention_mask=to_device(mask, device),
            past_key_values=cache,
            generation_config=generation_config,
            **kwargs,
        )[:, ids.shape[1] :]
        response = output.cpu()
        is_end = torch.isin(response, torch.tensor(generation_config.eos_token_id).flatten()).long()
        before_end = is_end.cumsum(1) == is_end  # true up to the first end token, with it
        ids, mask = torch.cat([ids, response], dim=1), torch.cat([mask, before_end.to(mask.dtype)], dim=1)
        # The last column has been sampled, but not been run.
        self._calls.append(_Call(cache, ids[:, :-1], mask[:, :-1]))
        return torch.cat([input_ids, output], dim=1)

    def _take(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[_Call | None, Tensor]:
        """Returns a call that all prompts go on from, forgotten from now on, and the row of it for each of them."""
        for call in self._calls:
            rows = call.rows_before(input_ids, attention_mask)
            if rows is not None:
                self._calls.remove(call)
                return call, rows
        if len(self._calls) == self._calls.maxlen:
            self._calls.popleft()  # it would be forgotten after the call, and needs the memory until then
        return None, torch.empty(0, dtype=torch.long)


@dataclass(eq=False)
class _Call:
    """What a call has left.

    Args:
        cache: Its keys and values.
        ids: (N, L), as they lie in the cache, padding between turns included. On the CPU.
        mask: (N, L), 1 where they are real. On the CPU.
    """

    cache: Cache
    ids: Tensor
    mask: Tensor

    def rows_before(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor | None:
        """Returns, for every prompt, the row that it goes on from, or `None` if they must be run anew."""
        lengths = self.mask.sum(1)
        rows: list[int] = []
        candidate = 0
        for prompt, real in zip(input_ids, attention_mask, strict=True):
            tokens = prompt[real.bool()]
            while candidate < len(lengths) and not self._goes_on(candidate, int(lengths[candidate]), tokens):
                candidate += 1
            if candidate == len(lengths):
                return None
            rows.append(candidate)
            candidate += 1
        kept = torch.tensor(rows)
        is_mostly_padding = self.mask.shape[1] > 2 * int(lengths[kept].max())
        return None if is_mostly_padding else kept

    def _goes_on(self, row: int, length: int, tokens: Tensor) -> bool:
        return length < len(tokens) and torch.equal(self.ids[row][self.mask[row].bool()], tokens[:length])


def can_reuse(model: Any) -> bool:
    """Whether every layer attends to everything; others keep only a part of the keys and values, or other states."""
    layers = DynamicCache(config=model.config.get_text_config()).layers
    return not getattr(model, "_is_stateful", False) and all(type(layer) is DynamicLayer for layer in layers)


# Settings of generation that look at the scores of the next token alone, or count what is new. Others look at the whole
# sequence, in which there is padding between turns, or want a cache of their own.
_HARMLESS = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "max_new_tokens", "min_new_tokens", "suppress_tokens", "renormalize_logits", "remove_invalid_values",
    "bos_token_id", "eos_token_id", "pad_token_id", "disable_compile", "transformers_version", "_from_model_config",
    "max_length",  # of a model's own settings; `max_new_tokens` goes before it
}  # fmt: skip
_NEUTRAL = {"use_cache": True, "repetition_penalty": 1.0, "num_beams": 1, "num_return_sequences": 1}


def settings_allow_reuse(model: Any, generation_config: Any) -> bool:
    """Whether going on from the call before gives what generation from the start gives, with these settings.

    What they leave open is taken from the model's own.
    """
    settings: dict[str, Any] = {}
    for config in (model.generation_config, generation_config):
        settings |= {name: value for name, value in config.to_dict().items() if value is not None}
    return all(name in _HARMLESS or value == _NEUTRAL.get(name, False) for name, value in settings.items())


@contextmanager
def reusing_prefixes(model: Any, calls: int = 1) -> Iterator[PrefixCache]:
    """Lets a model's `generate` go on from one of the calls before, until the end of the block."""
    cache, before = PrefixCache(model, calls), vars(model).get("generate")
    model.generate = cache.generate
    try:
        yield cache
    finally:
        if before is None:
            del model.generate
        else:
            model.generate = before
