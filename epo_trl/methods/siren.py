"""SIREN (arXiv 2509.25133): the entropy of the least certain tokens is held where it was at the first RL step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from epo_trl.methods.base import Batch, Method, MicroBatch, Need, Shaped
from epo_trl.methods.token_statistics import token_share

# Two passes of one policy differ by rounding. Entropies, in nats, that do not differ by more than this are equal.
_ROUNDING = 1e-5


def peak_tokens(entropy: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """Returns (B, T) booleans: in each row the counted tokens whose entropy is above the quantile of the row's.

    Where none is above it, because the highest entropies are equal, those at it.

    Args:
        entropy: (B, T) in nats.
        mask: (B, T), 1 on the tokens that count.
        quantile: From 0 to below 1.
    """
    counted = mask.bool()
    ordered = entropy.masked_fill(~counted, torch.inf).sort(1).values
    # The quantile lies between this entropy and the next: the same tokens are above both.
    place = (quantile * (counted.sum(1, keepdim=True) - 1).double() + 1e-9).long().clamp(min=0)
    at = ordered.gather(1, place)
    above = counted & (entropy > at + _ROUNDING)
    return torch.where(above.any(1, keepdim=True), above, counted & (entropy >= at - _ROUNDING))


def _peak_weights(peaks: Tensor) -> Tensor:
    """Returns (B, T) weights with which a sum over a row's tokens is the mean over its peaks."""
    return peaks / peaks.sum(1, keepdim=True).clamp(min=1)


@dataclass
class SIREN(Method):
    """Adds `weight * (Hbar - anchor)^2`. Hbar is the mean over episodes of the mean nucleus entropy of their peaks.

    The nucleus of a token are the fewest alternatives that together have `top_p` of the policy's probability, at the
    sampling temperature; its entropy is that of the policy renormalised over them. The peaks of an episode are its
    tokens above the `quantile` of these entropies. They are told when the batch is collected, over all turns, and stay
    for all updates on it.

    Hbar is a mean over the whole batch, on all ranks, so the square is taken of Hbar at collection and the loss gets
    its tangent there: `weight * (d^2 + 2 d (Hbar - sg(Hbar)))` with `d = sg(Hbar) - anchor`. This is the square's value
    and gradient for the first update on a batch, however it is cut. Only the entropy carries a gradient.

    Args:
        weight: c, the paper's 0.005.
        top_p: Probability of the nucleus, the paper's 0.8.
        quantile: The paper's 0.8: a fifth of the tokens are peaks.
        anchor: In nats; by default Hbar of the first RL step.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.SCORES, Need.TOP_P})

    weight: float = 0.005
    top_p: float = 0.8
    quantile: float = 0.8
    anchor: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            raise ValueError(f"weight: got {self.weight}, takes a number >= 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, takes a number above 0, at most 1")
        if not 0 <= self.quantile < 1:
            raise ValueError(f"quantile: got {self.quantile}, takes a number from 0 to below 1")
        if self.anchor is not None and not 0 <= self.anchor < math.inf:
            raise ValueError(f"anchor: got {self.anchor}, takes a number >= 0 (nats)")
        self._anchor = self.anchor
        self._entropy = math.nan  # Hbar of the batch at collection

    def described(self) -> str:
        """Returns name, paper and weight."""
        return f"[SIREN](https://arxiv.org/abs/2509.25133), weight {self.weight:g}"

    def shape(self, advantages: Tensor, batch: Batch) -> Shaped:
        """Leaves the advantages, marks the peaks, and sets the anchor at the first batch with a token."""
        assert batch.top_p_entropy is not None
        peaks = peak_tokens(batch.top_p_entropy, batch.mask, self.quantile)
        means = (_peak_weights(peaks.double()) * batch.top_p_entropy).sum(1)
        total, rows = batch.ranks.sum(torch.stack([means.sum(), peaks.any(1).sum().double()])).tolist()
        self._entropy = total / rows if rows else math.nan
        metrics = {"siren/peak_share": token_share(peaks, batch)}
        if math.isfinite(self._entropy):
            self._anchor = self._entropy if self._anchor is None else self._anchor
            metrics |= {"siren/entropy": self._entropy, "siren/anchor": self._anchor}
        return Shaped(advantages, {"peaks": peaks}, metrics)

    def loss(self, micro: MicroBatch) -> Tensor | None:
        """Returns these rows' part of the tangent."""
        distance = math.nan if self._anchor is None else self._entropy - self._anchor
        if not (self.weight and distance and math.isfinite(distance)):
            return None
        assert micro.top_p_entropy is not None
        tangent = distance * (distance + 2 * (micro.top_p_entropy - self._entropy))
        weights = _peak_weights(micro.marks["peaks"].to(tangent.dtype)) / micro.num_episodes.clamp(min=1)
        return self.weight * (weights * tangent).sum()

    def state_dict(self) -> dict[str, Any]:
        """Returns the anchor."""
        return {"anchor": self._anchor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes it up, unless the settings name another."""
        self._anchor = state["anchor"] if self.anchor is None else self.anchor

    def batch_state(self) -> dict[str, Tensor]:
        """Returns Hbar of the batch."""
        return {"entropy": torch.tensor(self._entropy, dtype=torch.float64)}

    def load_batch_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes it up."""
        self._entropy = state["entropy"].item()
