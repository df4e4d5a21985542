"""Adaptive entropy control (Skywork-OR1, arXiv 2505.22312): an entropy bonus that tracks a target entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from epo_trl.bounds import NonNegative
from epo_trl.methods.base import Method, MicroBatch, StepSummary


@dataclass
class AdaptiveEntropy(Method):
    """Adds `-c_k * L_H`, with EPO's mean L_H (Eq. 4), while the entropy is at most the target.

    After each RL step, `c` grows by `delta`, up to `maximum`, if the step's mean token entropy was at most `target`.
    Otherwise it shrinks by `delta`, down to 0. As in the paper, the step after one above the target has no bonus.

    Args:
        target: Target entropy per token, in nats. The paper uses 0.2 for mathematics; it depends on model and task.
        delta: Change of the coefficient per RL step. The paper uses 0.005.
        start: Initial coefficient.
        maximum: Upper bound of the coefficient. The authors' 7B script uses 0.005 and moves by 0.0001 per step.
    """

    card = "[adaptive entropy control](https://arxiv.org/abs/2505.22312), target {target:g}"

    target: NonNegative
    delta: NonNegative = 0.005
    start: NonNegative = 0.0
    maximum: NonNegative = 0.005

    def __post_init__(self) -> None:
        super().__post_init__()
        self.coefficient, self.active = self.start, True

    def loss(self, micro: MicroBatch) -> Tensor | None:
        if not (self.active and self.coefficient):
            return None
        return -self.coefficient * micro.turn_mean(micro.entropy)

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        used = self.coefficient if self.active else 0.0
        if math.isfinite(step.entropy):
            self.active = step.entropy <= self.target
            moved = self.coefficient + (self.delta if self.active else -self.delta)
            self.coefficient = min(max(moved, 0.0), self.maximum)
        return {"adaptive/coefficient": used}

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient, "active": self.active}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coefficient, self.active = state["coefficient"], state["active"]
