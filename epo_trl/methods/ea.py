"""Entropy-based advantage (arXiv 2506.14758): tokens at which the policy had a choice get a larger advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from epo_trl.bounds import NonNegative, Range
from epo_trl.methods.base import Batch, Method, ModifiedAdvantages, Need


@dataclass
class EntropyAdvantage(Method):
    """`A' = A + min(alpha * H, |A| / kappa)`, with the entropy H of the behaviour policy, without gradient.

    With kappa above 1 an advantage keeps its sign.

    Args:
        alpha: Weight of the entropy. The paper uses 0.4 with GRPO and 0.1 with PPO.
        kappa: Bound of the bonus relative to the advantage. The paper uses 2.
    """

    card = "[entropy-based advantages](https://arxiv.org/abs/2506.14758), alpha {alpha:g}"
    needs = {Need.SCORES}

    alpha: NonNegative = 0.4
    kappa: Annotated[float, Range(above=1)] = 2.0

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> ModifiedAdvantages:
        return ModifiedAdvantages(advantages + torch.minimum(self.alpha * batch.entropy, advantages.abs() / self.kappa))
