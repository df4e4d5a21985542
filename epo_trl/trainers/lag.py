"""Off-policy data on any engine: each batch is played with the weights of an earlier RL step.

A rollout that runs ahead of the updates plays with old weights. `simulated_lag` has the same effect in one process, so
that a CPU can show what staleness does to learning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from epo_trl.errors import InputError
from epo_trl.methods import Comm


class LaggedPolicy:
    """The weights of the last RL steps.

    Until there are that many, the oldest weights act, as at the start of a rollout that runs ahead.

    Args:
        lag: Number of RL steps that the acting policy is behind the trained one, at least 1.
    """

    def __init__(self, lag: int):
        self.lag = lag
        self._weights: deque[dict[str, Tensor]] = deque(maxlen=lag + 1)  # the oldest first
        self._newest = -1  # RL step that began with the last of them

    def remember(self, model: torch.nn.Module, rl_step: int) -> None:
        """Keeps a copy of the trained weights, once per RL step: a resumed run may repeat a rollout."""
        if rl_step != self._newest:
            self._weights.append({name: p.detach().clone() for name, p in _trained(model).items()})
            self._newest = rl_step

    @contextmanager
    def acting(self, model: torch.nn.Module) -> Iterator[None]:
        """Gives the model the oldest weights for the block."""
        parameters = _trained(model)
        current = {name: p.data for name, p in parameters.items()}
        try:
            for name, weight in self._weights[0].items():
                parameters[name].data = weight
            yield
        finally:
            for name, weight in current.items():
                parameters[name].data = weight

    @contextmanager
    def playing(self, model: torch.nn.Module, engine: Any, rl_step: int) -> Iterator[None]:
        """Remembers the trained weights, and gives model and engine the oldest ones for the block."""
        self.remember(model, rl_step)
        with self.acting(model):
            engine.weights_changed()
            yield
        engine.weights_changed()

    def state_dict(self) -> dict[str, Any]:
        """Returns the weights that a resumed run needs."""
        return {"weights": list(self._weights), "newest": self._newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the weights."""
        self._weights, self._newest = deque(state["weights"], maxlen=self.lag + 1), state["newest"]


def make_lagged_policy(trainer: Any) -> LaggedPolicy:
    """Returns the lagged policy of a trainer with `simulated_lag`, after `check_correction` where vLLM samples."""
    if trainer.args.use_vllm:
        check_correction(trainer.args)
    return LaggedPolicy(trainer.args.simulated_lag)


def check_correction(args: Any) -> None:
    """Raises `InputError` unless TRL's importance weights for vLLM's samples are used as `lag_correction` asks."""
    wanted = args.lag_correction
    if args.vllm_importance_sampling_correction != wanted:
        raise InputError(
            f"vllm_importance_sampling_correction: expected {wanted} with lag_correction {wanted}, got {not wanted}. "
            "With vLLM, these weights of TRL's are the correction for the lag. Set both fields to the same value"
        )


def importance_weights(
    logps: Tensor, acting_logps: Tensor, mask: Tensor, largest: float | None, ranks: Comm
) -> tuple[Tensor, dict[str, float]]:
    """Returns (B, T) truncated importance weights `min(pi / mu, largest)` and their metrics. Collective.

    TRL has the same weights for the difference between vLLM and the trained policy (`token_truncate`).

    Args:
        logps: (B, T) log-probabilities under the policy pi that is updated, in nats.
        acting_logps: (B, T) log-probabilities under the policy mu that played, in nats.
        mask: (B, T), 1 on the tokens that count.
        largest: Largest weight; `None` for none.
        ranks: Communication with the other processes.
    """
    difference = (logps - acting_logps) * mask
    weights = difference.exp()
    if largest is not None:
        weights = weights.clamp(max=largest)
    sums = torch.stack([(weights * mask).sum(), difference.abs().sum(), mask.sum()]).double()
    total, distance, count = ranks.sum(sums).tolist()
    return weights, {
        "lag/importance_weight": total / max(count, 1),
        "lag/logp_difference": distance / max(count, 1),
    }


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad and ".critic." not in f".{name}"}
