"""A KV cache with preallocated memory: transformers' own cache copies everything for each new token."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, (N, heads, tokens, head size), as the first tokens of a larger block of memory.

    A full block is replaced by one with room for a quarter more tokens, so each token is copied only a few times.
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
