"""A policy loss that is a mean over turns instead of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from epo_trl.bounds import OneOf
from epo_trl.errors import InputError
from epo_trl.methods.base import Batch, Method, ModifiedAdvantages
from epo_trl.methods.token_statistics import on_tokens, token_extremes, turn_sums

_TOKEN_MEANS = ("dapo", "cispo", "vespo")  # TRL's losses that are means over the tokens of the whole batch


@dataclass
class TurnMean(Method):
    """`A' = A * N * w`: the loss, a mean over the N counted tokens of the batch, becomes `sum of w * loss of a token`.

    w is the weight of a token in a mean over tokens of each turn, then over turns. The weights depend on the whole
    batch, on all ranks, and the mean of `N * w` over the tokens is 1.

    Args:
        over: `"turns"`, the mean over all turns of the batch, as with one sequence per turn; or `"episodes"`, the mean
            over the turns of each episode, then over episodes, as EPO's terms (arXiv 2509.22576, Eq. 4).
    """

    card = "a policy loss averaged over {over}"

    over: Annotated[str, OneOf(("turns", "episodes"))] = "turns"

    def check(self, args: Any) -> None:
        if args.loss_type not in _TOKEN_MEANS:
            raise InputError(f"loss_type: expected one of {_TOKEN_MEANS} with 'turn-mean', got {args.loss_type!r}")

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> ModifiedAdvantages:
        lengths = turn_sums(batch.mask, batch)
        divisors = lengths * (lengths > 0).sum(1, keepdim=True) if self.over == "episodes" else lengths
        weights = batch.mask / on_tokens(divisors, batch).clamp(min=1)
        tokens, total = batch.ranks.sum(torch.stack([lengths.sum(), weights.sum()])).tolist()
        factors = weights * (tokens / max(total, 1.0))
        low, high = token_extremes(factors, batch)
        metrics = {"turn-mean/factor_min": low, "turn-mean/factor_max": high}
        return ModifiedAdvantages(advantages * factors.to(advantages.dtype), metrics=metrics)
