"""Statistics over the tokens and turns of a collected batch, over all ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from epo_trl.methods.base import Batch

# Two passes of the same policy differ by rounding. Entropies within this distance, in nats, count as equal.
ROUNDING_NATS = 1e-5


def token_moments(values: Tensor, batch: Batch) -> tuple[float, float]:
    """Returns the mean and standard deviation of (B, T) values over the counted tokens of all ranks.

    Both are 0 without any token. Collective.
    """
    return masked_moments(values, batch.mask, batch.ranks.sum)


def masked_moments(values: Tensor, mask: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Returns the mean and standard deviation of (B, T) values where the (B, T) mask is 1, over all ranks.

    Both are 0 if the mask is empty. Collective.
    """
    chosen = torch.where(mask.bool(), values, 0.0).double()
    sums = torch.stack([mask.bool().sum().double(), chosen.sum(), chosen.square().sum()])
    count, total, squared = sum_over_ranks(sums).tolist()
    mean = total / max(count, 1)
    return mean, math.sqrt(max(squared / max(count, 1) - mean**2, 0.0))


def token_share(chosen: Tensor, batch: Batch) -> float:
    """Returns the share of the counted tokens of all ranks for which (B, T) `chosen` is true. Collective."""
    return token_moments(chosen.double(), batch)[0]


def per_turn_means(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns (B, K) means of (B, T) values over the counted tokens of each turn, and the (B, K) mask of such turns.

    The means are float64, and 0 for turns without counted tokens.
    """
    counts = turn_sums(batch.mask, batch)
    return turn_sums(values.double() * batch.mask, batch) / counts.clamp(min=1), counts > 0


def turn_sums(values: Tensor, batch: Batch) -> Tensor:
    """Returns (B, K) sums of (B, T) values over the tokens of each turn, float64."""
    sums = torch.zeros_like(batch.turn_rewards, dtype=torch.float64)
    return sums.scatter_add(1, batch.turn_ids.clamp(min=0).long(), values.double())


def on_tokens(per_turn: Tensor, batch: Batch) -> Tensor:
    """Expands (B, K) values per turn to (B, T) values per token. Padding gets the first turn's value."""
    return per_turn.gather(1, batch.turn_ids.clamp(min=0).long())


def rows_on_tokens(rows: Sequence[Sequence[float]], batch: Batch) -> Tensor:
    """Returns (B, T) values of the counted tokens from those of each row's first turns; 0 in later ones."""
    per_turn = torch.zeros_like(batch.turn_rewards)
    for i, values in enumerate(rows):
        per_turn[i, : len(values)] = torch.tensor(values)
    return on_tokens(per_turn, batch) * batch.mask


def turns_by_group(per_turn: Tensor, turn_mask: Tensor, batch: Batch) -> dict[int, Tensor]:
    """Returns the (B, K) values of the turns in the mask on all ranks, concatenated by task group. Collective."""
    values, turn_mask = per_turn.cpu(), turn_mask.cpu()
    groups = batch.group_ids.cpu().unsqueeze(1).expand_as(turn_mask)[turn_mask].tolist()
    gathered = gather_by_key([zip(groups, values[turn_mask].tolist(), strict=True)], batch)
    return {group: per_turn.new_tensor(values) for group, values in gathered.items()}


def gather_by_key(rows: Iterable[Iterable[tuple[Any, Any]]], batch: Batch) -> dict[Any, list[Any]]:
    """Collects the values of this rank's rows of (key, value), by key over all ranks. Collective."""
    gathered: dict[Any, list[Any]] = defaultdict(list)
    for key, value in batch.ranks.gather([pair for row in rows for pair in row]):
        gathered[key].append(value)
    return gathered


def number_of_tokens(share: float, batch: Batch) -> int:
    """Returns a share of the counted tokens of all ranks as a number: rounded down, but at least 1 unless it is 0.

    Collective.
    """
    return max(1, int(share * int(batch.ranks.sum(batch.mask.sum())))) if share else 0


def lowest(keys: Tensor, candidates: Tensor, number: int, batch: Batch) -> Tensor:
    """Returns (B, T), true on the candidates of all ranks with the `number` lowest keys, or on all if there are fewer.

    Ties are broken in favour of the lowest rank, then of the first position. Collective.
    """
    device, keys, candidates = candidates.device, keys.cpu(), candidates.cpu()
    places, values = candidates.nonzero(), keys[candidates].double()
    order = values.argsort(stable=True)[:number].tolist()
    mine = [(value, batch.ranks.index, i) for i, value in zip(order, values[order].tolist(), strict=True)]
    taken = [i for _, rank, i in sorted(batch.ranks.gather(mine))[:number] if rank == batch.ranks.index]
    chosen = torch.zeros_like(candidates)
    chosen[tuple(places[taken].T)] = True
    return chosen.to(device)


def token_extremes(values: Tensor, batch: Batch) -> tuple[float, float]:
    """Returns the minimum and maximum of (B, T) values over the counted tokens of all ranks; 0 and 0 without any.

    Collective.
    """
    counted = batch.mask.bool()
    low, high = (torch.where(counted, x, torch.inf).amin() for x in (values, -values))
    lowest, minus_highest, number = torch.stack([low, high, counted.sum().to(low)]).tolist()
    every = batch.ranks.gather([lowest, -minus_highest] if number else [])
    return (min(every), max(every)) if every else (0.0, 0.0)
