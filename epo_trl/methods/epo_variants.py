"""Variants of EPO: the ablations of arXiv 2509.22576, the schedule of its second version, a turn-level band."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from epo_trl.bounds import NonNegative, OneOf
from epo_trl.errors import InputError
from epo_trl.methods.base import MicroBatch
from epo_trl.methods.epo import EPO
from epo_trl.objectives import check_schedule, falling_beta, scheduled_weight, turn_means


@dataclass
class EPOBase(EPO):
    """EPO's bonus alone, `-lambda * L_H`: no smoothing, beta_k is 0.

    The band settings only affect the logged metrics.
    """

    variant = " (EPO-Base: without smoothing)"

    def beta(self, rl_step: int, total_rl_steps: int) -> float:
        """Returns 0."""
        return 0.0


@dataclass(kw_only=True)
class EPODecay(EPOBase):
    """EPO-Base with a lambda that decays from `epo_lambda` to `end_weight`, over the RL steps or over the turns.

    Over turns, the tokens of turn t of every episode have the weight of the schedule at t of `max_turns`. The paper
    describes both kinds without values.

    Args:
        over: `"training"` (appendix B.4.1) or `"turns"` (section 5.4).
        end_weight: Weight at the last RL step, or in turn `max_turns`; at most `epo_lambda`.
        schedule: `"linear"` or `"cosine"`.
    """

    config_fields = (*EPO.config_fields, "max_turns")
    variant = " (EPO-Decay: without smoothing, with a falling weight)"

    max_turns: int
    over: Annotated[str, OneOf(("training", "turns"))]
    end_weight: float
    schedule: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_schedule(self.schedule, self.end_weight)
        if self.end_weight > self.epo_lambda:
            raise InputError(f"end_weight: expected at most epo_lambda ({self.epo_lambda}), got {self.end_weight}")

    def weight(self, rl_step: int, total_rl_steps: int) -> float:
        """Returns lambda at this RL step; over turns, lambda of the first turn."""
        return self._falling(rl_step, total_rl_steps) if self.over == "training" else self.epo_lambda

    def loss(self, micro: MicroBatch) -> Tensor | None:
        """Returns the entropy bonus."""
        if self.over == "training":
            return super().loss(micro)
        if not self.epo_lambda:
            return None
        of_turn = micro.entropy.new_tensor([self._falling(turn, self.max_turns) for turn in range(self.max_turns)])
        return -micro.turn_mean(of_turn[micro.turn_ids.clamp(0, self.max_turns - 1).long()] * micro.entropy)

    def _falling(self, step: int, steps: int) -> float:
        return scheduled_weight(step, steps, schedule=self.schedule, start=self.epo_lambda, end=self.end_weight)


@dataclass(kw_only=True)
class EPOConstantBeta(EPO):
    """EPO with a constant weight of the smoothing term instead of Eq. 7.

    Args:
        beta_k: Weight of the smoothing term.
    """

    variant = " with a constant beta"

    beta_k: NonNegative

    def beta(self, rl_step: int, total_rl_steps: int) -> float:
        """Returns `beta_k`."""
        return self.beta_k


@dataclass
class EPOSecondVersion(EPO):
    """EPO with the schedule of the paper's second version: in the second half, beta_k keeps falling towards 1.

    `beta_k = 1 + (smoothing_beta_start - 1) * exp(-smoothing_decay * k / k_mid)`, with 2 and 3 in the paper.
    `smoothing_beta_end` is ignored.
    """

    variant = " with the schedule of its second version"

    def beta(self, rl_step: int, total_rl_steps: int) -> float:
        """Returns beta_k of the second version."""
        return falling_beta(rl_step, total_rl_steps, start=self.smoothing_beta_start, decay=self.smoothing_decay)


@dataclass
class TurnBand(EPO):
    """EPO whose band (Eq. 5) applies to the mean entropy of each turn instead of each token's entropy.

    All tokens of a turn are below, inside or above the band together, and those of a turn outside the band are pushed
    equally. With `smoothing_alpha * beta_k` above 1, the entropy of turns above the band decreases. Not from a paper:
    it follows a question of the EPO paper's reviewers. There are no published values.
    """

    variant = " with its band on turns"

    def _banded(self, micro: MicroBatch) -> Tensor:
        return turn_means(micro.entropy, micro.turn_ids, micro.mask)
