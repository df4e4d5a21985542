"""Keys and values in memory that is allocated ahead: transformers' own cache copies all of them for each new token."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, (N, heads, tokens, head size), as the first tokens of a larger block of memory.

    A block that is full is replaced by one with room for a quarter more tokens, so a token is copied a few times only.
    """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Starts without a block."""
        super().lazy_initialization(key_states, value_states)
        self._blocks: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Returns all keys and values after those of new tokens were added."""
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
            # Selecting or repeating rows leaves keys and values that are no part of the blocks any more.
            ours = before == 0 or self.keys.data_ptr() == blocks[0].data_ptr()
            if ours and blocks[0].shape[0] == key_states.shape[0] and after <= blocks[0].shape[-2]:
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
    """Returns an empty cache for a model whose layers attend to everything."""
    return Cache(layer_class_to_replicate=GrowingLayer)
