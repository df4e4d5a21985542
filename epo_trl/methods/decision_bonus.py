"""An entropy bonus on decision tokens only. Ours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from epo_trl.methods.base import Batch, Method, MicroBatch, Need, Shaped, StepSummary
from epo_trl.methods.decisions import check_decisions, decision_metrics, decision_tokens
from epo_trl.objectives import check_schedule, scheduled_weight


@dataclass
class DecisionBonus(Method):
    """Adds `-weight_k * (sum of w * D * H)`, EPO's mean (Eq. 4) of the entropy of decision tokens (D = 1) alone.

    Forced tokens count in the mean as 0: a decision token gets the push that EPO's bonus of that weight gives it. Which
    tokens are decisions is told when the batch is collected, and stays for all updates on it; only H has a gradient.
    One of `threshold` and `top_share` is given. No source has numbers.

    Args:
        weight: At the first RL step.
        threshold: Decisions are tokens whose entropy is above it, in nats; or
        top_share: Decisions are this share of the batch's tokens, those with most entropy.
        schedule: `"constant"`, `"linear"` or `"cosine"`, over the RL steps.
        end_weight: At the last RL step, unless the weight is constant.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.SCORES})

    weight: float
    threshold: float | None = None
    top_share: float | None = None
    schedule: str = "constant"
    end_weight: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            raise ValueError(f"weight: got {self.weight}, takes a number >= 0")
        check_schedule(self.schedule, self.end_weight)
        check_decisions(self.threshold, self.top_share)

    def described(self) -> str:
        """Returns name and weight."""
        return f"an entropy bonus on decision tokens, weight {self.weight:g}"

    def shape(self, advantages: Tensor, batch: Batch) -> Shaped:
        """Leaves the advantages, and marks the decisions."""
        decisions = decision_tokens(batch, threshold=self.threshold, top_share=self.top_share)
        return Shaped(advantages, {"decisions": decisions}, decision_metrics(decisions, batch))

    def loss(self, micro: MicroBatch) -> Tensor | None:
        """Returns the bonus."""
        weight = self._weight(micro.rl_step, micro.total_rl_steps)
        return -weight * micro.turn_mean(micro.marks["decisions"] * micro.entropy) if weight else None

    def _weight(self, rl_step: int, total_rl_steps: int) -> float:
        return scheduled_weight(rl_step, total_rl_steps, schedule=self.schedule, start=self.weight, end=self.end_weight)

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        """Returns the weight."""
        return {"decision-bonus/weight": self._weight(step.rl_step, step.total_rl_steps)}
