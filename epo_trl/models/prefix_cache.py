"""Generation that goes on from where the last call ended, for prompts that grow by what was said since."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class PrefixCache:
    """Stands in for a model's `generate` and keeps the keys and values of what it has seen.

    In concatenated context the prompt of a turn is that of the turn before, the response to it and something new. Only
    the latter is run. A row that ended since is forgotten. If some row does not go on from a row of the call before
    (in the same order), or padding makes up more than half of what is kept, everything is run anew.

    The keys and values are those of the weights that made them: start a new one when the weights change.

    Args:
        model: A causal language model whose layers attend to everything, see `can_reuse`.
    """

    def __init__(self, model: Any) -> None:
        self._generate = model.generate
        self._cache: DynamicCache | None = None
        self._ids = torch.empty(0, 0)  # (N, L) as they lie in the cache, padding between turns included
        self._mask = torch.empty(0, 0)  # (N, L), 1 where they are real
        self.reused = 0  # tokens that did not have to be run again, over all calls

    def generate(self, *, input_ids: Tensor, attention_mask: Tensor, generation_config: Any, **kwargs: Any) -> Tensor:
        """Returns (N, P + R) ids as the model's own `generate` would have.

        Args:
            input_ids: (N, P), padded on the left.
            attention_mask: (N, P), 0 on padding.
            generation_config: As for the model.
            **kwargs: As for the model.
        """
        kept = self._kept(input_ids, attention_mask) if self._cache is not None else None
        if kept is None:
            self._cache, ids, mask = DynamicCache(), input_ids, attention_mask
        else:
            assert self._cache is not None
            self._cache.batch_select_indices(kept)
            ids, mask = self._ids[kept], self._mask[kept]
            self.reused += int(mask.sum())
            new = attention_mask.sum(1) - mask.sum(1)
            width = int(new.max())
            fresh = torch.arange(width, device=new.device) >= width - new.unsqueeze(1)
            # The prompts end at the same column, so their last `width` columns hold what is new, after what is not.
            ids = torch.cat([ids, input_ids[:, -width:]], dim=1)
            mask = torch.cat([mask, fresh.to(mask.dtype)], dim=1)
        output = self._generate(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=self._cache,
            generation_config=generation_config,
            **kwargs,
        )
        response = output[:, ids.shape[1] :]
        self._remember(output, mask, response, generation_config)
        return torch.cat([input_ids, response], dim=1)

    def _remember(self, output: Tensor, mask: Tensor, response: Tensor, config: Any) -> None:
        ends = torch.tensor(config.eos_token_id, device=response.device).flatten()
        is_end = torch.isin(response, ends).long()
        before_end = is_end.cumsum(1) == is_end  # true up to the first end token, with it
        # The last column has been sampled, but not been run.
        self._ids = output[:, :-1]
        self._mask = torch.cat([mask, before_end.to(mask.dtype)], dim=1)[:, :-1]

    def _kept(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor | None:
        """Returns, for every prompt, the row of the cache that it goes on from, or `None` if it must be run anew."""
        lengths = self._mask.sum(1)
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
        kept = torch.tensor(rows, device=input_ids.device)
        is_mostly_padding = self._mask.shape[1] > 2 * int(lengths[kept].max())
        return None if is_mostly_padding else kept

    def _goes_on(self, row: int, length: int, tokens: Tensor) -> bool:
        return length < len(tokens) and torch.equal(self._ids[row][self._mask[row].bool()], tokens[:length])


def can_reuse(model: Any) -> bool:
    """Whether every layer attends to everything; others keep only a part of the keys and values, or other states."""
    layers = DynamicCache(config=model.config.get_text_config()).layers
    return not getattr(model, "_is_stateful", False) and all(type(layer) is DynamicLayer for layer in layers)


@contextmanager
def reusing_prefixes(model: Any) -> Iterator[PrefixCache]:
    """Lets a model's `generate` go on from the call before, until the end of the block."""
    cache, before = PrefixCache(model), vars(model).get("generate")
    model.generate = cache.generate
    try:
        yield cache
    finally:
        if before is None:
            del model.generate
        else:
            model.generate = before
