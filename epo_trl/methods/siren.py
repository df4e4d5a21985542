"""SIREN (arXiv 2509.25133): keeps the entropy of the least certain tokens at its value of the first RL step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from epo_trl.bounds import NonNegative, PositiveShare, Range
from epo_trl.methods.base import Batch, Method, MicroBatch, ModifiedAdvantages, Need, Statistic
from epo_trl.methods.token_statistics import ROUNDING_NATS, token_share

FEW = 64  # most nuclei are not larger; sorting a whole vocabulary takes fifteen times as long as finding these
_ROUNDING = 1e-6  # tolerance within which a sum of probabilities has reached `top_p`


def peak_tokens(entropy: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """Returns (B, T) booleans: in each row, the tokens of the mask whose entropy in nats exceeds the row's quantile.

    If none exceeds it, because the highest entropies are equal, the tokens at the quantile are returned.
    """
    counted = mask.bool()
    ordered = entropy.masked_fill(~counted, torch.inf).sort(1).values
    # Any value from this entropy up to the next selects the same tokens.
    place = (quantile * (counted.sum(1, keepdim=True) - 1).double() + 1e-9).long().clamp(min=0)
    at = ordered.gather(1, place)
    above = counted & (entropy > at + ROUNDING_NATS)
    return torch.where(above.any(1, keepdim=True), above, counted & (entropy >= at - ROUNDING_NATS))


def _peak_weights(peaks: Tensor) -> Tensor:
    """Returns (B, T) weights; a weighted sum over a row's tokens is the mean over its peaks."""
    return peaks / peaks.sum(1, keepdim=True).clamp(min=1)


def top_p_entropy(logits: Tensor, top_p: float) -> Tensor:
    """Returns (n,) entropies in nats of (n, V) distributions restricted to, and renormalised over, their nuclei.

    All tokens tied at the edge of a nucleus are inside. Differentiable; the nucleus itself is treated as constant.
    """
    with torch.no_grad():
        p = logits.softmax(-1)
        outside = p < _least_inside(p, top_p)
    log_q = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
    return -(log_q.exp() * log_q.masked_fill(outside, 0.0)).sum(-1)


def _least_inside(p: Tensor, top_p: float) -> Tensor:
    """Returns (n, 1), the smallest probability inside each nucleus."""
    least, wider = _last_needed(p.topk(min(FEW, p.shape[-1])).values, top_p)
    if FEW < p.shape[-1]:
        rows = wider.nonzero().squeeze(1)
        least[rows], _ = _last_needed(p[rows].sort(-1, descending=True).values, top_p)
    return least


def _last_needed(ordered: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Returns (n, 1) the last of (n, k) descending probabilities needed for `top_p`, and (n,) whether all are."""
    needed = ordered.cumsum(-1) - ordered < top_p - _ROUNDING
    needed[:, 0] = True
    return ordered.gather(-1, needed.sum(-1, keepdim=True) - 1), needed.all(-1)


@dataclass
class SIREN(Method):
    """Adds `weight * (Hbar - anchor)^2`. Hbar is the mean over episodes of the mean nucleus entropy of their peaks.

    The nucleus of a token is the smallest set of alternatives with total probability `top_p` under the policy, at the
    sampling temperature. Its entropy is that of the policy renormalised over the set. The peaks of an episode are its
    tokens above the `quantile` of these entropies at collection.

    Hbar is a mean over the whole batch, on all ranks, so the loss gets the square's tangent at collection, however the
    batch is split: `weight * (d^2 + 2 d (Hbar - sg(Hbar)))` with `d = sg(Hbar) - anchor`.

    Args:
        weight: c. The paper uses 0.005.
        top_p: Total probability of the nucleus. The paper uses 0.8.
        quantile: Quantile above which tokens are peaks. The paper uses 0.8: a fifth of the tokens are peaks.
        anchor: Target of Hbar in nats; defaults to Hbar of the first RL step.
    """

    card = "[SIREN](https://arxiv.org/abs/2509.25133), weight {weight:g}"
    needs = {Need.SCORES}

    weight: NonNegative = 0.005
    top_p: PositiveShare = 0.8
    quantile: Annotated[float, Range(least=0, below=1)] = 0.8
    anchor: NonNegative | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._anchor = self.anchor
        self._entropy = math.nan  # Hbar of the batch at collection

    @property
    def statistics(self) -> Mapping[str, Statistic]:
        return {"entropy": lambda head, _: head.map(partial(top_p_entropy, top_p=self.top_p))}

    loss_statistics = statistics

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> ModifiedAdvantages:
        entropy = batch.statistics["entropy"]
        peaks = peak_tokens(entropy, batch.mask, self.quantile)
        means = (_peak_weights(peaks.double()) * entropy).sum(1)
        total, rows = batch.ranks.sum(torch.stack([means.sum(), peaks.any(1).sum().double()])).tolist()
        self._entropy = total / rows if rows else math.nan
        metrics = {"siren/peak_share": token_share(peaks, batch)}
        if math.isfinite(self._entropy):
            self._anchor = self._entropy if self._anchor is None else self._anchor
            metrics |= {"siren/entropy": self._entropy, "siren/anchor": self._anchor}
        return ModifiedAdvantages(advantages, {"peaks": peaks}, metrics)

    def loss(self, micro: MicroBatch) -> Tensor | None:
        distance = math.nan if self._anchor is None else self._entropy - self._anchor
        if not (self.weight and distance and math.isfinite(distance)):
            return None
        tangent = distance * (distance + 2 * (micro.statistics["entropy"] - self._entropy))
        weights = _peak_weights(micro.token_annotations["peaks"].to(tangent.dtype)) / micro.num_episodes.clamp(min=1)
        return self.weight * (weights * tangent).sum()

    def state_dict(self) -> dict[str, Any]:
        return {"anchor": self._anchor, "entropy": self._entropy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._entropy = state["entropy"]
        self._anchor = state["anchor"] if self.anchor is None else self.anchor
