"""AEM, adaptive entropy modulation (arXiv 2605.00425): weights turns by their entropy relative to their group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epo_trl.bounds import NonNegative
from epo_trl.methods.base import Batch, Method, ModifiedAdvantages, Need
from epo_trl.methods.token_statistics import ROUNDING_NATS, on_tokens, per_turn_means, turns_by_group


@dataclass
class AEM(Method):
    """`A' = A * exp(-T h) / mean exp(-T h)`, equal for all tokens of a response, that is, of a turn.

    h is the mean token entropy of the response, scaled to run from 0 to 1 over the responses of its group on all ranks.
    The mean is over the same responses. If all entropies are equal up to rounding, the weights are 1.

    Args:
        temperature: T. The paper uses 1. With 0 all weights are 1.
    """

    card = "[AEM, adaptive entropy modulation](https://arxiv.org/abs/2605.00425), T {temperature:g}"
    needs = {Need.SCORES}

    temperature: NonNegative = 1.0

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> ModifiedAdvantages:
        entropy, turn_mask = per_turn_means(batch.entropy, batch)
        groups = turns_by_group(entropy, turn_mask, batch)
        weights = torch.ones_like(entropy)
        for i, group in enumerate(batch.group_ids.tolist()):
            if group in groups:
                weights[i] = torch.where(turn_mask[i], self._relative(entropy[i], groups[group]), 1.0)
        all_weights = torch.cat([self._relative(values, values) for values in groups.values()] or [weights.new_ones(1)])
        metrics = {"aem/weight_min": float(all_weights.min()), "aem/weight_max": float(all_weights.max())}
        return ModifiedAdvantages(advantages * on_tokens(weights, batch).to(advantages.dtype), metrics=metrics)

    def _relative(self, entropy: Tensor, group: Tensor) -> Tensor:
        """Returns the weights of responses with this entropy, relative to their group."""
        low, width = group.min(), group.max() - group.min()
        width = torch.where(width > ROUNDING_NATS, width, torch.inf)
        weight, others = ((-self.temperature * (x - low) / width).exp() for x in (entropy, group))
        return weight / others.mean()
