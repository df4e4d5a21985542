"""An entropy bonus whose coefficient seeks a target entropy (Skywork-OR1, arXiv 2505.22312)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from epo_trl.methods.base import Method, MicroBatch, StepSummary


@dataclass
class AdaptiveEntropy(Method):
    """Adds `-c_k * L_H`, with EPO's mean L_H (Eq. 4), while the entropy is at most the target.

    After each RL step `c` grows by `delta` if its mean entropy over tokens was at most `target`, at most to `maximum`,
    and shrinks by `delta` otherwise, never below 0. As in the paper, a step above the target is followed by one without
    a bonus.

    Args:
        target: Entropy per token to keep, in nats. The paper has 0.2 for mathematics; it depends on model and task.
        delta: The paper's 0.005.
        start: The first coefficient.
        maximum: The highest. The 0.005 of the authors' script for 7B, which moves by 0.0001 a step; TRL's own adaptive
            bonus has 1.
    """

    target: float
    delta: float = 0.005
    start: float = 0.0
    maximum: float = 0.005

    def __post_init__(self) -> None:
        for name in ("target", "delta", "start", "maximum"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes a number >= 0")
        if self.start > self.maximum:
            raise ValueError(f"start: got {self.start}, takes a number <= maximum ({self.maximum})")
        self.coefficient, self.active = self.start, True

    def described(self) -> str:
        """Returns name and paper."""
        return f"[adaptive entropy control](https://arxiv.org/abs/2505.22312), target {self.target:g}"

    def loss(self, micro: MicroBatch) -> Tensor | None:
        """Returns the bonus."""
        if not (self.active and self.coefficient):
            return None
        return -self.coefficient * micro.turn_mean(micro.entropy)

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        """Moves the coefficient; a batch without a token, or with an entropy that is not finite, leaves it."""
        used = self.coefficient if self.active else 0.0
        if math.isfinite(step.entropy):
            self.active = step.entropy <= self.target
            moved = self.coefficient + (self.delta if self.active else -self.delta)
            self.coefficient = min(max(moved, 0.0), self.maximum)
        return {"adaptive/coefficient": used}

    def state_dict(self) -> dict[str, Any]:
        """Returns the coefficient."""
        return {"coefficient": self.coefficient, "active": self.active}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes it up."""
        self.coefficient, self.active = state["coefficient"], state["active"]
