"""Variants of EPO: the ablations of arXiv 2509.22576, the schedule of its second version, a band on turns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from epo_trl.methods.base import MicroBatch
from epo_trl.methods.epo import EPO
from epo_trl.objectives import check_schedule, falling_beta, scheduled_weight, turn_means

OVER = ("training", "turns")


@dataclass
class EPOBase(EPO):
    """EPO's bonus alone, `-lambda * L_H`: no smoothing, beta_k is 0.

    The settings of the band matter only for what is logged about it.
    """

    variant: ClassVar[str] = " (EPO-Base: without smoothing)"

    def beta(self, rl_step: int, total_rl_steps: int) -> float:
        """Returns 0."""
        return 0.0


@dataclass(kw_only=True)
class EPODecay(EPOBase):
    """EPO-Base with a lambda that falls from `epo_lambda` to `end_weight`: over the RL steps, or over the turns.

    Over turns, the tokens of turn t of every episode have the weight that the schedule gives to t of `max_turns`. The
    paper has both kinds, and no numbers.

    Args:
        over: `"training"` (appendix B.4.1) or `"turns"` (section 5.4).
        end_weight: At the last RL step, or in turn `max_turns`; at most `epo_lambda`.
        schedule: `"linear"` or `"cosine"`.
    """

    config_fields: ClassVar[tuple[str, ...]] = (*EPO.config_fields, "max_turns")
    variant: ClassVar[str] = " (EPO-Decay: without smoothing, with a falling weight)"

    max_turns: int
    over: str
    end_weight: float
    schedule: str = "linear"

    def __post_init__(self) -> None:
        if self.over not in OVER:
            raise ValueError(f"over: got {self.over!r}, takes one of {OVER}")
        check_schedule(self.schedule, self.end_weight)
        if self.end_weight > self.epo_lambda:
            raise ValueError(f"end_weight: got {self.end_weight}, takes at most epo_lambda ({self.epo_lambda})")
        super().__post_init__()

    def weight(self, rl_step: int, total_rl_steps: int) -> float:
        """Returns lambda at that RL step; over turns, the first turn's."""
        return self._falling(rl_step, total_rl_steps) if self.over == "training" else self.epo_lambda

    def loss(self, micro: MicroBatch) -> Tensor | None:
        """Returns the bonus."""
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
    """EPO whose smoothing has the same weight throughout, in place of Eq. 7.

    Args:
        beta_k: That weight.
    """

    variant: ClassVar[str] = " with a constant beta"

    beta_k: float

    def __post_init__(self) -> None:
        if not 0 <= self.beta_k < math.inf:
            raise ValueError(f"beta_k: got {self.beta_k}, takes a number >= 0")
        super().__post_init__()

    def beta(self, rl_step: int, total_rl_steps: int) -> float:
        """Returns `beta_k`."""
        return self.beta_k


@dataclass
class EPOSecondVersion(EPO):
    """EPO with the schedule of the paper's second version: beta_k goes on falling towards 1 in the second half.

    `beta_k = 1 + (smoothing_beta_start - 1) * exp(-smoothing_decay * k / k_mid)`, with the paper's 2 and 3.
    `smoothing_beta_end` is not read.
    """

    variant: ClassVar[str] = " with the schedule of its second version"

    def beta(self, rl_step: int, total_rl_steps: int) -> float:
        """Returns beta_k of the second version."""
        return falling_beta(rl_step, total_rl_steps, start=self.smoothing_beta_start, decay=self.smoothing_decay)


@dataclass
class TurnBand(EPO):
    """EPO whose band (Eq. 5) is held against the mean entropy of a turn, in place of each token's.

    All tokens of a turn are below, inside or above the band together, and those of a turn outside of it get the same
    push. With `smoothing_alpha * beta_k` above 1 entropy falls in turns above the band. Ours, after a question of the
    paper's reviewers; no source has numbers.
    """

    variant: ClassVar[str] = " with its band on turns"

    def _banded(self, micro: MicroBatch) -> Tensor:
        return turn_means(micro.entropy, micro.turn_ids, micro.mask)
