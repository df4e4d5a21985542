"""An entropy bonus over the reference nucleus: the tokens that the reference policy considered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from epo_trl.bounds import NonNegative, Range
from epo_trl.methods.base import Batch, Method, MicroBatch, ModifiedAdvantages, Statistic, StepSummary, Tally
from epo_trl.methods.lm_head import LMHead
from epo_trl.objectives import check_schedule, scheduled_weight


@dataclass
class ReferenceNucleus(Method):
    """Adds `-weight * L_N`: EPO's mean (Eq. 4) of each token's nucleus entropy N instead of its entropy H.

    Let S be the tokens with a probability above `cut` under the frozen reference policy, and `q(v) = pi(v) / pi(S)`.
    Then `N = -sum over v in S of q(v) log q(v)`, 0 without a gradient if S has one element. Only the policy carries a
    gradient. Not from a paper; the defaults come from a pilot.

    Args:
        cut: Probability, at the sampling temperature, above which a token belongs to S; below 0.5, so that two fit.
        weight: Coefficient at the first RL step.
        schedule: `"constant"`, `"linear"` or `"cosine"`, over the RL steps of the run.
        end_weight: Coefficient at the last RL step; `None` with a constant schedule.
    """

    card = "an entropy bonus over the reference nucleus (above {cut:g}), weight {weight:g}, {schedule}"
    loss_statistics = {"entropy": lambda head, marks: nucleus_entropy(head, marks["candidates"])}

    cut: Annotated[float, Range(least=0.001, below=0.5)] = 0.02
    weight: NonNegative = 0.1
    schedule: str = "constant"
    end_weight: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_schedule(self.schedule, self.end_weight)
        self.tally = Tally("choices", "forced", "nucleus_entropy", "choice_entropy", "forced_entropy")

    def weight_at(self, rl_step: int, total_rl_steps: int) -> float:
        """Returns the coefficient of an RL step."""
        return scheduled_weight(rl_step, total_rl_steps, schedule=self.schedule, start=self.weight, end=self.end_weight)

    @property
    def reference_statistics(self) -> Mapping[str, Statistic]:
        return {"candidates": lambda head, _: nucleus(head, self.cut)}

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> ModifiedAdvantages:
        return ModifiedAdvantages(advantages, {"candidates": batch.reference["candidates"]})

    def loss(self, micro: MicroBatch) -> Tensor | None:
        """Returns the contribution of these rows to the bonus; with a weight of 0 it is only logged."""
        has_choice = (micro.token_annotations["candidates"] >= 0).any(-1)
        nucleus, entropy = micro.statistics["entropy"], micro.entropy
        choice, forced = has_choice * micro.mask, ~has_choice * micro.mask
        self.tally.add(
            choices=choice.sum(),
            forced=forced.sum(),
            nucleus_entropy=(nucleus.detach() * choice).sum(),
            choice_entropy=(entropy.detach() * choice).sum(),
            forced_entropy=(entropy.detach() * forced).sum(),
        )
        weight = self.weight_at(micro.rl_step, micro.total_rl_steps)
        return -weight * micro.turn_mean(nucleus) if weight else None

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        """Returns the weight, the share of choices and the entropies, averaged over the updates on the batch.

        Without a choice, `ref-nucleus/choice_entropy` is absent: 0 would count as a collapse.
        """
        sums = self.tally.take(step.ranks)
        choices, forced = sums["choices"], sums["forced"]
        of_choices = {"ref-nucleus/choice_entropy": sums["choice_entropy"] / choices} if choices else {}
        return {
            "ref-nucleus/weight": self.weight_at(step.rl_step, step.total_rl_steps),
            "ref-nucleus/choice_share": choices / max(choices + forced, 1),
            "ref-nucleus/entropy": sums["nucleus_entropy"] / max(choices, 1),
            **of_choices,
            "ref-nucleus/forced_entropy": sums["forced_entropy"] / max(forced, 1),
        }


def nucleus(head: LMHead, cut: float) -> Tensor:
    """Returns (m, K) ids of the tokens with a probability above `cut`, most probable first, padded with -1.

    A position with fewer than two such tokens has only -1: there is no choice. K is the maximum possible number.
    """
    most = min(int(1 / cut), len(head.weight))

    def ids(logits: Tensor) -> Tensor:
        top = logits.softmax(-1).topk(most)
        inside = top.values > cut
        return torch.where(inside & (inside.sum(-1, keepdim=True) > 1), top.indices, -1)

    return head.map(ids)


def nucleus_entropy(head: LMHead, candidates: Tensor) -> Tensor:
    """Returns (m,) entropies of the model restricted to, and renormalised over, (m, K) candidates, padded with -1.

    In nats, 0 where there are none. Differentiable through the hidden states and the candidates' rows of the weight.
    """
    inside = candidates >= 0
    row, column = inside.nonzero(as_tuple=True)
    ids = candidates[row, column]
    wide = torch.promote_types(head.hidden.dtype, torch.float32)
    projected = (head.hidden[row].to(wide) * head.weight[ids].to(wide)).sum(-1)
    if head.bias is not None:
        projected = projected + head.bias[ids]
    # -inf outside the candidates, but 0 in rows without any: a row of infinities has no gradient.
    outside = torch.zeros(inside.shape, dtype=wide, device=inside.device)
    outside = outside.masked_fill(inside.any(-1, keepdim=True), -torch.inf)
    log_p = outside.index_put((row, column), head.logits(projected)).log_softmax(-1)
    return -(log_p.exp() * log_p.masked_fill(~inside, 0.0)).sum(-1)
