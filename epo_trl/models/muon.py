"""Muon for the hidden matrices of a model trained from scratch, AdamW for everything else."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

MOMENTUM = 0.95
_COEFFICIENTS, _ITERATIONS = (3.4445, -4.7750, 2.0315), 5


class MuonWithAdamW(torch.optim.AdamW):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) next to AdamW in one optimizer.

    A group with `muon: True` holds matrices. Their update is the orthogonalized momentum, times `0.2 sqrt(max(m, n))`
    for a matrix of m x n, which is as large as an update of AdamW (Liu et al. 2025, arXiv 2502.16982). Unlike
    `torch.optim.Muon` it iterates in the dtype of the weights: without hardware for bfloat16 that is many times faster.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters, without a closure. Afterwards the matrices have no gradient."""
        for group in self.param_groups:
            for matrix in group["params"] if group["muon"] else ():
                if matrix.grad is not None:
                    self._update(matrix, matrix.grad, group["lr"], group["weight_decay"])
                    matrix.grad = None  # AdamW leaves it alone
        super().step()

    def _update(self, matrix: nn.Parameter, gradient: torch.Tensor, lr: float, weight_decay: float) -> None:
        state = self.state[matrix]
        if not state:  # AdamW reads the step of every parameter when it loads a state
            state["step"], state["momentum"] = torch.tensor(0.0), torch.zeros_like(matrix)
        state["step"] += 1
        state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        update = orthogonalize(gradient.lerp(state["momentum"], MOMENTUM))
        matrix.mul_(1 - lr * weight_decay).add_(update, alpha=-0.2 * lr * math.sqrt(max(matrix.shape)))


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Moves the singular values of a matrix to about 1 (0.7 to 1.2) by five Newton-Schulz iterations."""
    a, b, c = _COEFFICIENTS
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


def make_muon(
    model: PreTrainedModel, *, lr: float, matrix_lr: float, weight_decay: float, **kwargs: Any
) -> MuonWithAdamW:
    """Makes the optimizer of a language model, with further arguments of `torch.optim.AdamW`.

    AdamW trains the embeddings, head, norms and biases with `lr` and no weight decay.
    """
    outer = {id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[parameter.ndim == 2 and id(parameter) not in outer].append(parameter)
    return MuonWithAdamW(
        [
            {"params": groups[False], "muon": False, "weight_decay": 0.0},
            {"params": groups[True], "muon": True, "weight_decay": weight_decay, "lr": matrix_lr},
        ],
        lr=lr,
        **kwargs,
    )
