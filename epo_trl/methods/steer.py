"""STEER (arXiv 2510.10150): reduces the weight of tokens that would change the entropy most."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from epo_trl.bounds import Positive, PositiveShare
from epo_trl.methods.base import Batch, Method, ModifiedAdvantages, Need
from epo_trl.methods.token_statistics import token_extremes, token_moments


@dataclass
class STEER(Method):
    """`A' = A * exp(-k |Omega|)`, where `Omega = A / pi_old * pi (1 - pi) (ln pi + H)` estimates the change of entropy.

    `k = -ln(min_weight) / max(max |Omega|, floor)`: the token with the largest change gets `min_weight`, others more.
    pi is the token's probability and H the entropy there, both under the behaviour policy, so pi equals pi_old and
    `Omega = A (1 - pi) (ln pi + H)`. The maximum is over the batch, on all ranks.

    Args:
        min_weight: w_min. The authors' script for these weights uses 0.8; the default of their code is 0.95. With 1 all
            weights are 1.
        floor: Smallest value used as the largest change. The authors use 0.02.
    """

    card = "[STEER](https://arxiv.org/abs/2510.10150), least weight {min_weight:g}"
    needs = {Need.SCORES}

    min_weight: PositiveShare = 0.8
    floor: Positive = 0.02

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> ModifiedAdvantages:
        change = (advantages * (1 - batch.logps.exp()) * (batch.logps + batch.entropy)).abs()
        _, largest = token_extremes(change, batch)
        k = -math.log(self.min_weight) / max(largest, self.floor)
        weights = (-k * change).exp().clamp(self.min_weight, 1.0)
        metrics = {"steer/largest_change": largest, "steer/weight": token_moments(weights, batch)[0]}
        return ModifiedAdvantages(advantages * weights.to(advantages.dtype), metrics=metrics)
