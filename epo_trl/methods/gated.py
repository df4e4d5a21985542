"""Gated rewards (G-RA, arXiv 2508.10548): rewards along the way count only if the outcome is good enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epo_trl.methods.base import StepSummary
from epo_trl.methods.grpo import GRPO
from epo_trl.methods.tally import Tallied, Tally
from epo_trl.types import Episode


@dataclass
class Gated(Tallied, GRPO):
    """`R = R_out + 1[R_out > threshold] * weight * sum of R_step`, with GRPO's advantage of R.

    `R_out` is what the rollout pays: `success_reward` for a solved task, less the penalties of invalid actions.
    `R_step` is the environment's own reward of a turn. The source has no numbers that fit other tasks, so both settings
    are required.

    Args:
        threshold: In units of reward; the gate opens above it. Half of `success_reward` asks for a solved task.
        weight: Factor on the environment's own rewards.
    """

    threshold: float
    weight: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.threshold):
            raise ValueError(f"threshold: got {self.threshold}, takes a finite number")
        if not 0 <= self.weight < math.inf:
            raise ValueError(f"weight: got {self.weight}, takes a number >= 0")
        self.tally = Tally(2)

    def described(self) -> str:
        """Returns name and paper."""
        return f"[gated rewards](https://arxiv.org/abs/2508.10548) above {self.threshold:g}, weight {self.weight:g}"

    def check(self, args: Any) -> None:
        """Refuses the environment's rewards a second time, without a gate."""
        if args.env_reward_weight:
            raise ValueError(
                f"env_reward_weight: got {args.env_reward_weight} together with credit 'gated', which adds the "
                "environment's rewards behind its gate; takes 0"
            )

    def turn_rewards(self, episode: Episode) -> Sequence[float] | None:
        """Returns the rollout's rewards, with the environment's added if the gate is open."""
        is_open = episode.total_reward > self.threshold
        if episode.is_usable:
            self.tally.add(is_open, 1)
        return [turn.reward + self.weight * turn.env_reward for turn in episode.turns] if is_open else None

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        """Returns the share of episodes whose gate was open."""
        opened, episodes = self.tally.take(step.ranks)
        return {"gated/open": opened / max(episodes, 1)}
