"""An entropy bonus on decision tokens, at which the behaviour policy had a choice. Not from a paper."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epo_trl.bounds import NonNegative
from epo_trl.methods.base import Batch, Method, MicroBatch, ModifiedAdvantages, Need, StepSummary
from epo_trl.objectives import check_schedule, scheduled_weight


@dataclass
class DecisionBonus(Method):
    """Adds `-weight_k * (sum of w * D * H)`: EPO's mean (Eq. 4) of the entropy of decision tokens (D = 1) only.

    Forced tokens count as 0 in the mean, so a decision token gets the same gradient as from EPO's bonus with that
    weight. Decision tokens are selected at collection and stay fixed for all updates on the batch; only H has a
    gradient. There are no published values.

    Args:
        weight: Weight at the first RL step.
        threshold: Entropy in nats above which a token is a decision.
        schedule: `"constant"`, `"linear"` or `"cosine"`, over the RL steps.
        end_weight: Weight at the last RL step; `None` with a constant schedule.
    """

    card = "an entropy bonus on decision tokens, weight {weight:g}"
    needs = {Need.SCORES}

    weight: NonNegative
    threshold: NonNegative
    schedule: str = "constant"
    end_weight: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_schedule(self.schedule, self.end_weight)

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> ModifiedAdvantages:
        decisions = batch.mask.bool() & (batch.entropy > self.threshold)
        parts = torch.stack([decisions, batch.mask.bool() & ~decisions]).flatten(1)
        sums = torch.where(parts, batch.entropy.double().flatten(), 0.0).sum(1)
        sums, counts = batch.ranks.sum(torch.stack([sums, parts.sum(1)])).tolist()
        names = ("entropy/decision_tokens", "entropy/forced_tokens")
        metrics = {name: sums[i] / counts[i] for i, name in enumerate(names) if counts[i]}
        metrics["entropy/decision_share"] = counts[0] / max(sum(counts), 1)
        return ModifiedAdvantages(advantages, {"decisions": decisions}, metrics)

    def loss(self, micro: MicroBatch) -> Tensor | None:
        weight = self._weight(micro.rl_step, micro.total_rl_steps)
        return -weight * micro.turn_mean(micro.token_annotations["decisions"] * micro.entropy) if weight else None

    def _weight(self, rl_step: int, total_rl_steps: int) -> float:
        return scheduled_weight(rl_step, total_rl_steps, schedule=self.schedule, start=self.weight, end=self.end_weight)

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        return {"decision-bonus/weight": self._weight(step.rl_step, step.total_rl_steps)}
