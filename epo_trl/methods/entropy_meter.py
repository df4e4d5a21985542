"""Entropy statistics of one RL step, over all micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_PARTS = ("all_tokens", "early_turns", "late_turns", "first_third", "middle_third", "last_third")


class EntropyMeter:
    """Accumulates the entropies of parts of an episode; means are taken only over the whole RL step.

    Early turns are the first half of each episode (including the middle turn of an odd number), late turns the rest.
    Turn t, from 0, of n belongs to third floor(3 t / n). Leftover turns go to the earlier thirds: an episode of one
    turn is a first third, one of two turns a first and a middle third.

    Args:
        max_turns: Number of turn indices with a separate mean.
    """

    def __init__(self, max_turns: int):
        self.max_turns = max_turns
        self.clear()

    def clear(self) -> None:
        """Resets the sums. Rows: sums and counts. Columns: the parts, then the turn indices."""
        self.sums = torch.zeros(2, len(_PARTS) + self.max_turns, dtype=torch.float64)

    @torch.no_grad()
    def add(self, entropy: Tensor, turn_ids: Tensor, response_mask: Tensor) -> None:
        """Adds (B, T) entropies in nats, with the turn of each token and a mask of those that count."""
        self.sums = self.sums.to(entropy.device)
        mask = response_mask.bool()
        turns = torch.where(mask, turn_ids, -1)
        number = turns.amax(1, keepdim=True) + 1
        early = mask & (2 * turns < number)
        third = 3 * turns // number.clamp(min=1)
        thirds = (mask & (third == i) for i in range(3))
        # Only masks, no indices: finding where a mask is true would synchronise with the device.
        parts = torch.stack([mask, early, mask & ~early, *thirds]).flatten(1)
        values = torch.where(mask, entropy, 0.0).to(self.sums.dtype).flatten()
        self.sums[:, : len(_PARTS)] += torch.stack([torch.where(parts, values, 0.0).sum(1), parts.sum(1)])
        index = turns.clamp(min=0, max=self.max_turns - 1).long().flatten() + len(_PARTS)
        self.sums.index_add_(1, index, torch.stack([values, mask.flatten().to(values.dtype)]))

    def take(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> tuple[dict[str, float], dict[int, float]]:
        """Returns mean entropies in nats over all ranks, and resets the sums. Collective.

        The first are those of the parts, `"all_tokens"` being the token-level mean; the second those of the turn
        indices. Parts and turns without tokens are left out.
        """
        sums, counts = sum_over_ranks(self.sums).tolist()
        self.clear()
        means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
        parts, turns = zip(_PARTS, means, strict=False), enumerate(means[len(_PARTS) :])
        return {p: mean for p, mean in parts if mean is not None}, {t: mean for t, mean in turns if mean is not None}
