"""Decision tokens: tokens at which the behaviour policy had a choice. All others are forced."""

from __future__ import annotations

import torch
from torch import Tensor

from epo_trl.methods.base import Batch
from epo_trl.methods.token_statistics import lowest


def decision_tokens(batch: Batch, *, threshold: float | None = None, top_share: float | None = None) -> Tensor:
    """Returns (B, T) booleans, true on decision tokens. Collective.

    A token is a decision if its entropy under the behaviour policy exceeds `threshold`, or is among the `top_share` of
    highest entropies in the whole batch, on all ranks. A token with entropy 0 is always forced. Only sampled tokens
    that count in the loss are considered.

    Args:
        batch: A batch with the scores of the behaviour policy (`Need.SCORES`).
        threshold: Entropy threshold in nats. Exclusive with `top_share`.
        top_share: Fraction of the batch's tokens, rounded to a whole number of them.
    """
    counted = batch.mask.bool()
    if top_share is not None:
        number = round(top_share * batch.ranks.sum(counted.sum()).item())
        return lowest(-batch.entropy, counted & (batch.entropy > 0), number, batch)
    return counted & (batch.entropy > (threshold or 0.0))


def decision_metrics(decisions: Tensor, batch: Batch) -> dict[str, float]:
    """Returns the mean entropies of decision and forced tokens, in nats, and the share of decisions. Collective.

    Args:
        decisions: (B, T) booleans from `decision_tokens`.
        batch: The batch they belong to.
    """
    parts = torch.stack([decisions, batch.mask.bool() & ~decisions]).flatten(1)
    sums = torch.where(parts, batch.entropy.double().flatten(), 0.0).sum(1)
    sums, counts = batch.ranks.sum(torch.stack([sums, parts.sum(1)])).tolist()
    names = ("entropy/decision_tokens", "entropy/forced_tokens")
    means = {name: sums[i] / counts[i] for i, name in enumerate(names) if counts[i]}
    return {**means, "entropy/decision_share": counts[0] / max(sum(counts), 1)}
