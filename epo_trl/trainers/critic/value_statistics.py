"""Metrics of values and advantages of a collected batch, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from epo_trl.methods import Credit
from epo_trl.methods.token_statistics import masked_moments


def turn_bins(max_turns: int) -> list[str]:
    """Returns the names of the bins of turn positions: `1`, `2`, `3_4`, `5_8`, `9_16`, ..."""
    count = math.ceil(math.log2(max_turns)) + 1
    return ["1", "2", *(f"{2 ** (k - 1) + 1}_{2**k}" for k in range(2, count))][:count]


def value_statistics(
    credit: Credit, values: Tensor, turn_ids: Tensor, max_turns: int, sum_over_ranks: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Returns the metrics of the decision points of a batch. Collective.

    Explained variance is `1 - Var(return - value) / Var(return)`: 1 is perfect, 0 no better than a constant. It is
    omitted if the returns have no variance. Turn positions without decision points are omitted too.

    Args:
        credit: Credit with advantages before whitening.
        values: (B, T) values at collection.
        turn_ids: (B, T) turn of each token.
        max_turns: Maximum number of turns per episode.
        sum_over_ranks: Sums a tensor over all processes.
    """
    points = credit.value_mask
    assert points is not None and credit.returns is not None
    returns, value, advantage = (x[points].double() for x in (credit.returns, values, credit.advantages))
    error = returns - value
    names = turn_bins(max_turns)
    bins = torch.log2(turn_ids[points].double() + 1).ceil().long().clamp(max=len(names) - 1)
    # Columns: bins of turn positions. Rows: sums over their decision points.
    terms = torch.stack(
        [torch.ones_like(value), returns, returns**2, error, error**2, value, advantage, advantage**2]
    )  # fmt: skip
    sums = terms.new_zeros(len(terms), len(names)).index_add_(1, bins, terms)
    sums = sum_over_ranks(sums)

    count, *totals = sums.sum(1).tolist()
    if not count:
        return {}
    mean = [total / count for total in totals]
    metrics = {"critic/return": mean[0], "critic/value": mean[4]}
    spread, left = mean[1] - mean[0] ** 2, mean[3] - mean[2] ** 2
    if spread > 1e-12 * mean[1]:  # more than rounding
        metrics["critic/explained_variance"] = 1 - left / spread
    for name, (n, *_, v, a, squared) in zip(names, sums.T.tolist(), strict=True):
        if n:
            metrics[f"gae/value_turns_{name}"] = v / n
            metrics[f"gae/advantage_turns_{name}"] = a / n
            metrics[f"gae/advantage_std_turns_{name}"] = math.sqrt(max(squared / n - (a / n) ** 2, 0.0))
    return metrics


def whitened(advantages: Tensor, mask: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the (B, T) advantages with mean 0 and deviation 1 over the masked tokens of all ranks. Collective.

    Args:
        advantages: (B, T) advantages.
        mask: (B, T), 1 on the tokens of the loss; all others become 0.
        sum_over_ranks: Sums a tensor over all processes.
    """
    mean, deviation = masked_moments(advantages, mask, sum_over_ranks)
    return (advantages - mean) / (deviation + 1e-8) * mask
