"""An entropy bonus among the tokens that the policy at the start of RL would have chosen from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from epo_trl.methods.base import MicroBatch, Need, StepSummary
from epo_trl.methods.tally import Tallied, Tally
from epo_trl.objectives import check_schedule, scheduled_weight


@dataclass
class ReferenceNucleus(Tallied):
    """Adds `-weight * L_N`, with EPO's mean (Eq. 4) of the nucleus entropy N of each token in place of its entropy H.

    With S the tokens to which the frozen policy at the start of RL gives more than `cut`, and `q(v) = pi(v) / pi(S)`,
    `N = -sum over v in S of q(v) log q(v)`. A token that was forced at the start has one element in S: no entropy, and
    no gradient. Only the policy carries a gradient. Ours; the numbers are those of a pilot, no source has others.

    Args:
        cut: Probability, at the sampling temperature, above which a token belongs to S.
        weight: Coefficient; the one of the first RL step if it moves.
        schedule: `"constant"`, `"linear"` or `"cosine"`: how it moves over the RL steps of the run.
        end_weight: The one of the last RL step; `None` if it is constant.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.NUCLEUS})

    cut: float = 0.02
    weight: float = 0.1
    schedule: str = "constant"
    end_weight: float | None = None

    def __post_init__(self) -> None:
        if not 0.001 <= self.cut < 0.5:
            raise ValueError(f"cut: got {self.cut}, takes a number from 0.001 to below 0.5, where two tokens have room")
        if not 0 <= self.weight < math.inf:
            raise ValueError(f"weight: got {self.weight}, takes a number >= 0")
        check_schedule(self.schedule, self.end_weight)
        # Tokens with a choice and without, nucleus entropy of the former, entropy of the former and of the latter.
        self.tally = Tally(5)

    def described(self) -> str:
        """Returns what it is, and its settings."""
        end = "" if self.end_weight is None else f" to {self.end_weight:g}"
        return (
            f"an entropy bonus inside the nucleus of the first policy (above {self.cut:g}), weight {self.weight:g}{end}"
        )

    def weight_at(self, rl_step: int, total_rl_steps: int) -> float:
        """Returns the coefficient of an RL step."""
        return scheduled_weight(rl_step, total_rl_steps, schedule=self.schedule, start=self.weight, end=self.end_weight)

    def loss(self, micro: MicroBatch) -> Tensor | None:
        """Returns these rows' part of the bonus; with a weight of 0 it is only measured."""
        assert micro.nucleus_entropy is not None and micro.choice is not None
        choice, forced = micro.choice * micro.mask, ~micro.choice * micro.mask
        nucleus, entropy = micro.nucleus_entropy.detach(), micro.entropy.detach()
        self.tally.add(
            choice.sum(), forced.sum(), (nucleus * choice).sum(), (entropy * choice).sum(), (entropy * forced).sum()
        )
        weight = self.weight_at(micro.rl_step, micro.total_rl_steps)
        return -weight * micro.turn_mean(micro.nucleus_entropy) if weight else None

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        """Returns what the updates on the batch saw."""
        choice, forced, nucleus, chosen_entropy, forced_entropy = self.tally.take(step.ranks)
        return {
            "ref-nucleus/weight": self.weight_at(step.rl_step, step.total_rl_steps),
            "ref-nucleus/choice_share": choice / max(choice + forced, 1),
            "ref-nucleus/entropy": nucleus / max(choice, 1),
            "ref-nucleus/choice_entropy": chosen_entropy / max(choice, 1),
            "ref-nucleus/forced_entropy": forced_entropy / max(forced, 1),
        }
