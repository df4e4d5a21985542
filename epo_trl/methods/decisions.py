"""Decision tokens: those where the policy that played had a choice. The others are forced."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from epo_trl.methods.base import Batch
from epo_trl.methods.token_statistics import lowest


def decision_tokens(batch: Batch, *, threshold: float | None = None, top_share: float | None = None) -> Tensor:
    """Returns (B, T) booleans, true on decision tokens. Collective.

    A token is a decision if its entropy under the policy that played is above the `threshold`, or among the `top_share`
    of highest entropies in the whole batch, on all ranks. Without entropy it is forced in any case. Only sampled tokens
    that the loss counts are looked at.

    Args:
        batch: With the scores of the policy that played (`Need.SCORES`).
        threshold: In nats; or
        top_share: Share of the batch's tokens, rounded to a whole number of them.

    Raises:
        ValueError: As `check_decisions`.
    """
    check_decisions(threshold, top_share)
    assert batch.entropy is not None
    counted = batch.mask.bool()
    if threshold is not None:
        return counted & (batch.entropy > threshold)
    assert top_share is not None
    number = round(top_share * batch.ranks.sum(counted.sum()).item())
    return lowest(-batch.entropy, counted & (batch.entropy > 0), number, batch)


def check_decisions(threshold: float | None, top_share: float | None) -> None:
    """Raises `ValueError` unless one of the settings is given, in its range.

    Args:
        threshold: In nats, at least 0.
        top_share: Above 0, at most 1.
    """
    if (threshold is None) == (top_share is None):
        raise ValueError(f"threshold, top_share: got {threshold} and {top_share}, takes one of them")
    if threshold is not None and not 0 <= threshold < math.inf:
        raise ValueError(f"threshold: got {threshold}, takes a number >= 0 (nats)")
    if top_share is not None and not 0 < top_share <= 1:
        raise ValueError(f"top_share: got {top_share}, takes a number above 0, at most 1")


def decision_metrics(decisions: Tensor, batch: Batch) -> dict[str, float]:
    """Returns the mean entropies of decision and forced tokens, in nats, and the share of decisions. Collective.

    Args:
        decisions: (B, T) booleans, as `decision_tokens` returns them.
        batch: The same.
    """
    assert batch.entropy is not None
    parts = torch.stack([decisions, batch.mask.bool() & ~decisions]).flatten(1)
    sums = torch.where(parts, batch.entropy.double().flatten(), 0.0).sum(1)
    sums, counts = batch.ranks.sum(torch.stack([sums, parts.sum(1)])).tolist()
    names = ("entropy/decision_tokens", "entropy/forced_tokens")
    means = {name: sums[i] / counts[i] for i, name in enumerate(names) if counts[i]}
    return {**means, "entropy/decision_share": counts[0] / max(sum(counts), 1)}
