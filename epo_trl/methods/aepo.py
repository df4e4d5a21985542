"""AEPO, agentic entropy-balanced policy optimization (arXiv 2510.14545): its loss, without the branching rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epo_trl.bounds import NonNegative
from epo_trl.errors import InputError
from epo_trl.methods.base import Batch, Method, MicroBatch, ModifiedAdvantages, Need
from epo_trl.methods.token_statistics import token_extremes, token_moments


@dataclass
class AEPO(Method):
    """`A' = A * (1 + alpha * z)`, and a gradient for tokens that the policy loss clips from above.

    z is the token's entropy, standardised over the batch on all ranks. Where `A' > 0` and the ratio r exceeds
    `1 + epsilon_high`, the loss is `-A' (1 + epsilon_high) r / sg(r)`, with the value of the clipped loss.

    Args:
        alpha: Strength of the entropy weighting. The authors use 0.2.
        keep_clipped: Whether clipped tokens keep a gradient.
        epsilon: TRL's field.
        epsilon_high: TRL's field; `None` means `epsilon`.
    """

    card = "[AEPO](https://arxiv.org/abs/2510.14545) without its branching rollout, alpha {alpha:g}"
    needs = {Need.SCORES}
    config_fields = ("epsilon", "epsilon_high")

    alpha: NonNegative = 0.2
    keep_clipped: bool = True
    epsilon: float = 0.2
    epsilon_high: float | None = None

    def check(self, args: Any) -> None:
        if self.keep_clipped and "gspo" in args.policy_method:
            raise InputError(
                f"policy_method: expected a clipped ratio per token with 'aepo', got {args.policy_method}; set "
                "keep_clipped=false in method_kwargs"
            )

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> ModifiedAdvantages:
        mean, deviation = token_moments(batch.entropy, batch)
        factors = 1 + self.alpha * (batch.entropy - mean) / (deviation or 1.0)
        low, high = token_extremes(factors, batch)
        metrics = {"aepo/factor_min": low, "aepo/factor_max": high}
        return ModifiedAdvantages(advantages * factors.to(advantages.dtype), metrics=metrics)

    def loss(self, micro: MicroBatch) -> Tensor | None:
        """Returns a term of value 0 that restores the gradient of the clipped tokens."""
        if not self.keep_clipped:
            return None
        bound = 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        ratio = (micro.logps.detach() - micro.old_logps).exp()
        clipped = (ratio > bound) & (micro.advantages > 0)
        straight = (micro.logps - micro.logps.detach()).exp() - 1  # r / sg(r) - 1
        return -bound * micro.policy_mean(torch.where(clipped, micro.advantages * straight, 0.0))
