"""EMPG, entropy-modulated policy gradients (arXiv 2509.09265): rewards confident turns and confident next turns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from epo_trl.bounds import NonNegative
from epo_trl.methods.base import Batch, Method, ModifiedAdvantages, Need
from epo_trl.methods.token_statistics import ROUNDING_NATS, on_tokens, per_turn_means, turns_by_group


@dataclass
class EMPG(Method):
    """`A' = A * exp(-k h) / mean exp(-k h) + zeta * exp(-k h_next)`, then minus the mean of A' over the group's turns.

    h is the mean token entropy of a turn, scaled to run from 0 to 1 over the turns of the batch on all ranks; the mean
    is over the same turns. h_next belongs to the episode's next turn; the last turn gets no bonus.

    Args:
        k: Sharpness of the weighting. The paper uses 1.
        zeta: Weight of the bonus for a confident next turn. The paper uses 0.05.
        center: Whether to subtract the group's mean; the paper uses one mean over the turns of the whole batch.
    """

    card = "[EMPG, entropy-modulated policy gradients](https://arxiv.org/abs/2509.09265), k {k:g}, zeta {zeta:g}"
    needs = {Need.SCORES, Need.GROUPS}

    k: NonNegative = 1.0
    zeta: NonNegative = 0.05
    center: bool = True

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> ModifiedAdvantages:
        entropy, turn_mask = per_turn_means(batch.entropy, batch)
        all_entropies = entropy.new_tensor(batch.ranks.gather(entropy[turn_mask].tolist()))
        if not len(all_entropies):
            return ModifiedAdvantages(advantages)
        width = float(all_entropies.max() - all_entropies.min())
        width = width if width > ROUNDING_NATS else math.inf  # all equal
        clarity, others = ((-self.k * (x - all_entropies.min()) / width).exp() for x in (entropy, all_entropies))
        clarity = torch.where(turn_mask, clarity, 0.0)
        following = torch.cat([clarity[:, 1:], torch.zeros_like(clarity[:, :1])], dim=1)
        weights, bonus = clarity / others.mean(), self.zeta * following
        shaped = advantages * on_tokens(weights, batch) + on_tokens(bonus, batch)
        if self.center:
            shaped = shaped - on_tokens(self._group_means(shaped, batch), batch)
        metrics = {
            "empg/weight_min": float((others / others.mean()).min()),
            "empg/weight_max": float((others / others.mean()).max()),
        }
        return ModifiedAdvantages((shaped * batch.mask).to(advantages.dtype), metrics=metrics)

    def _group_means(self, shaped: Tensor, batch: Batch) -> Tensor:
        """Returns (B, K) means over all turns of each row's group."""
        per_turn, turn_mask = per_turn_means(shaped, batch)
        means = {group: values.mean() for group, values in turns_by_group(per_turn, turn_mask, batch).items()}
        zero = per_turn.new_zeros(())
        rows = torch.stack([means.get(group, zero) for group in batch.group_ids.tolist()])
        return rows.unsqueeze(1).expand_as(per_turn)
