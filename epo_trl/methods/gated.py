"""Gated rewards (G-RA, arXiv 2508.10548): step rewards count only if the outcome reward exceeds a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epo_trl.bounds import Finite, NonNegative
from epo_trl.errors import InputError
from epo_trl.methods.base import StepSummary, Tally
from epo_trl.methods.grpo import GRPO
from epo_trl.types import Episode


@dataclass
class Gated(GRPO):
    """`R = R_out + 1[R_out > threshold] * weight * sum of R_step`, with GRPO's advantage of R.

    `R_out` is the rollout's reward: `success_reward` for a solved task minus the invalid-action penalties. `R_step` is
    the environment's own reward of a turn.

    Args:
        threshold: Outcome reward above which the gate opens. Half of `success_reward` requires a solved task.
        weight: Factor on the environment's own rewards.
    """

    card = "[gated rewards](https://arxiv.org/abs/2508.10548) above {threshold:g}, weight {weight:g}"

    threshold: Finite
    weight: NonNegative

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tally = Tally("opened", "episodes")

    def check(self, args: Any) -> None:
        """Rejects environment rewards that bypass the gate."""
        if args.env_reward_weight:
            raise InputError(f"env_reward_weight: expected 0 with credit 'gated', got {args.env_reward_weight}")

    def turn_rewards(self, episode: Episode) -> Sequence[float] | None:
        is_open = episode.total_reward > self.threshold
        if episode.is_usable:
            self.tally.add(opened=is_open, episodes=1)
        return [turn.reward + self.weight * turn.env_reward for turn in episode.turns] if is_open else None

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        sums = self.tally.take(step.ranks)
        return {"gated/open": sums["opened"] / max(sums["episodes"], 1)}
