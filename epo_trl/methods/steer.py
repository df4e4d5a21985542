"""STEER (arXiv 2510.10150): tokens that would change the entropy much count a little less."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from epo_trl.methods.base import Batch, Method, Need, Shaped
from epo_trl.methods.token_statistics import token_extremes, token_moments


@dataclass
class STEER(Method):
    """`A' = A * exp(-k |Omega|)`, where `Omega = A / pi_old * pi (1 - pi) (ln pi + H)` estimates the change of entropy.

    `k = -ln(min_weight) / max(max |Omega|, floor)`: the token with the largest change gets `min_weight`, others more.
    pi is the token's probability and H the entropy there, both of the policy that played, so that pi is pi_old and
    `Omega = A (1 - pi) (ln pi + H)`; the maximum is over the batch, on all ranks. The weight multiplies the policy loss
    without gradient, which is to multiply the advantage.

    Args:
        min_weight: w_min, the 0.8 of the authors' script for these weights; the default of their code is 0.95. With 1
            all weights are 1.
        floor: Changes below it count little even where they are the largest. The authors' 0.02.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.SCORES})

    min_weight: float = 0.8
    floor: float = 0.02

    def __post_init__(self) -> None:
        if not 0 < self.min_weight <= 1:
            raise ValueError(f"min_weight: got {self.min_weight}, takes a number above 0, at most 1")
        if not 0 < self.floor < math.inf:
            raise ValueError(f"floor: got {self.floor}, takes a number > 0")

    def described(self) -> str:
        """Returns name and paper."""
        return f"[STEER](https://arxiv.org/abs/2510.10150), least weight {self.min_weight:g}"

    def shape(self, advantages: Tensor, batch: Batch) -> Shaped:
        """Returns the weighted advantages."""
        assert batch.logps is not None and batch.entropy is not None
        change = (advantages * (1 - batch.logps.exp()) * (batch.logps + batch.entropy)).abs()
        _, largest = token_extremes(change, batch)
        k = -math.log(self.min_weight) / max(largest, self.floor)
        weights = (-k * change).exp().clamp(self.min_weight, 1.0)
        metrics = {"steer/largest_change": largest, "steer/weight": token_moments(weights, batch)[0]}
        return Shaped(advantages * weights.to(advantages.dtype), metrics=metrics)
