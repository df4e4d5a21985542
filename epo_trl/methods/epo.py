"""EPO, entropy-regularized policy optimization (arXiv 2509.22576): entropy bonus and smoothing towards past entropy.

Its variants: the paper's ablations, the schedule of its second version, a turn-level band.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from torch import Tensor

from epo_trl.bounds import NonNegative, OneOf
from epo_trl.errors import InputError
from epo_trl.methods.base import Method, MicroBatch, StepSummary, Tally
from epo_trl.objectives import (
    EntropyHistory,
    band_shares,
    beta_schedule,
    check_schedule,
    falling_beta,
    scheduled_weight,
    smoothing,
    turn_means,
)


@dataclass
class EPO(Method):
    """Adds `-lambda * (L_H - beta_k * L_smooth)` to the policy loss (Eq. 4 to 7, Algorithm 1).

    The settings are the fields of `EPOConfig` with the same names. With `epo_lambda` 0 the terms are logged only.
    """

    variant = ""  # suffix of the name in a model card

    epo_lambda: float = 0.001
    smoothing_alpha: float = 0.1
    smoothing_beta_start: float = 2.0
    smoothing_beta_end: float = 1.0
    smoothing_decay: float = 3.0
    kappa_low: float = 0.0
    kappa_high: float = 2.0
    smoothing_penalty: str = "hinge"
    entropy_history: str = "step"
    entropy_history_window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.history = EntropyHistory(per=self.entropy_history, window=self.entropy_history_window)
        self.tally = Tally("below", "inside", "above", "bonus", "penalty", "observed")

    @property
    def card(self) -> str:
        paper = "[EPO, entropy-regularized policy optimization](https://arxiv.org/abs/2509.22576)"
        return f"{paper}{self.variant}, weight {self.epo_lambda:g}" if self.epo_lambda else ""

    def check(self, args: Any) -> None:
        """Rejects TRL's entropy bonus in addition to this one. Its size depends on how a batch is split."""
        if self.epo_lambda and (args.entropy_coef or args.use_adaptive_entropy):
            raise InputError(
                f"entropy_coef: expected 0 with epo_lambda={self.epo_lambda}, got {args.entropy_coef} "
                f"(use_adaptive_entropy={args.use_adaptive_entropy}): both are entropy bonuses"
            )

    def beta(self, rl_step: int, total_rl_steps: int) -> float:
        """Returns beta_k of Eq. 7."""
        return beta_schedule(
            rl_step,
            total_rl_steps,
            start=self.smoothing_beta_start,
            end=self.smoothing_beta_end,
            decay=self.smoothing_decay,
        )

    def weight(self, rl_step: int, total_rl_steps: int) -> float:
        """Returns lambda."""
        return self.epo_lambda

    def loss(self, micro: MicroBatch) -> Tensor | None:
        if not self.epo_lambda:
            return None
        bonus, penalty = self._terms(micro)
        weight, beta = (at(micro.rl_step, micro.total_rl_steps) for at in (self.weight, self.beta))
        return -weight * (bonus - beta * penalty)

    def _terms(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        penalty = smoothing.smoothing_penalty(
            self._banded(micro),
            self.history.reference(micro.turn_ids),
            kappa_low=self.kappa_low,
            kappa_high=self.kappa_high,
            alpha=self.smoothing_alpha,
            kind=self.smoothing_penalty,
        )
        return micro.turn_mean(micro.entropy), micro.turn_mean(penalty)

    def _banded(self, micro: MicroBatch) -> Tensor:
        """Returns the (b, T) entropies that are compared with the band."""
        return micro.entropy

    @torch.no_grad()
    def observe(self, micro: MicroBatch) -> None:
        reference = self.history.reference(micro.turn_ids)
        band = {"kappa_low": self.kappa_low, "kappa_high": self.kappa_high}
        below, inside, above = band_shares(self._banded(micro), reference, micro.mask, **band)
        bonus, penalty = self._terms(micro)
        observed = micro.turn_mean(torch.ones_like(micro.entropy))
        self.tally.add(below=below, inside=inside, above=above, bonus=bonus, penalty=penalty, observed=observed)

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        sums = self.tally.take(step.ranks)
        tokens = max(sums["below"] + sums["inside"] + sums["above"], 1)
        observed = sums["observed"] or 1.0  # a part, if the rest of a resumed RL step uses a part of a new batch
        weight, beta = (at(step.rl_step, step.total_rl_steps) for at in (self.weight, self.beta))
        has_gradient = self.smoothing_penalty == "hinge" and len(self.history) > 0
        metrics = {
            "epo/lambda": weight,
            "epo/beta": beta,
            "epo/net_coef_above_band": weight * (1 - self.smoothing_alpha * beta * has_gradient),
            "epo/entropy_loss": sums["bonus"] / observed,
            "epo/smoothing_loss": sums["penalty"] / observed,
            "epo/share_below_band": sums["below"] / tokens,
            "epo/share_inside_band": sums["inside"] / tokens,
            "epo/share_above_band": sums["above"] / tokens,
        }
        reference = self.history.reference() if self.history.per == "step" else None
        if isinstance(reference, float):
            metrics["epo/reference"] = reference
            metrics["epo/turn_deviation"] = sum(abs(entropy - reference) for entropy in step.turn_entropy.values())
        # A batch without tokens, or with a non-finite entropy, adds no entry.
        if math.isfinite(step.entropy):
            self.history.append(step.entropy if self.history.per == "step" else step.turn_entropy)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history.load_state_dict(state["history"])


EPO.config_fields = tuple(field.name for field in fields(EPO))


@dataclass
class EPOBase(EPO):
    """EPO's bonus alone, `-lambda * L_H`: no smoothing, beta_k is 0.

    The band settings only affect the logged metrics.
    """

    variant = " (EPO-Base: without smoothing)"

    def beta(self, rl_step: int, total_rl_steps: int) -> float:
        return 0.0


@dataclass(kw_only=True)
class EPODecay(EPOBase):
    """EPO-Base with a lambda that decays from `epo_lambda` to `end_weight`, over the RL steps or over the turns.

    Over turns, the tokens of turn t of every episode have the weight of the schedule at t of `max_turns`.

    Args:
        over: `"training"` (appendix B.4.1) or `"turns"` (section 5.4).
        end_weight: Weight at the last RL step, or in turn `max_turns`.
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

    def weight(self, rl_step: int, total_rl_steps: int) -> float:
        """Returns lambda at this RL step; over turns, lambda of the first turn."""
        return self._falling(rl_step, total_rl_steps) if self.over == "training" else self.epo_lambda

    def loss(self, micro: MicroBatch) -> Tensor | None:
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
        return self.beta_k


@dataclass
class EPOSecondVersion(EPO):
    """EPO with the schedule of the paper's second version.

    `beta_k = 1 + (smoothing_beta_start - 1) * exp(-smoothing_decay * k / k_mid)`, without `smoothing_beta_end`.
    """

    variant = " with the schedule of its second version"

    def beta(self, rl_step: int, total_rl_steps: int) -> float:
        return falling_beta(rl_step, total_rl_steps, start=self.smoothing_beta_start, decay=self.smoothing_decay)


@dataclass
class TurnBand(EPO):
    """EPO whose band (Eq. 5) applies to the mean entropy of each turn instead of each token's entropy.

    All tokens of a turn are below, inside or above the band together, and those of a turn outside the band are pushed
    equally. Not from a paper.
    """

    variant = " with its band on turns"

    def _banded(self, micro: MicroBatch) -> Tensor:
        return turn_means(micro.entropy, micro.turn_ids, micro.mask)
