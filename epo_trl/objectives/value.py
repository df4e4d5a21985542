"""The loss of the critic."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Returns half the squared error of each value, and a boolean mask of the values whose loss was clipped.

    `0.5 * max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2)`, as in OpenAI's PPO: moving a value further
    than `clip` from its value at collection does not reduce the loss.

    Args:
        values: Values of any shape, in units of reward. The loss is differentiable in them.
        old_values: Values at collection, of the same shape.
        returns: Targets, of the same shape.
        clip: Clipping range in units of reward; `None` for the plain squared error.
    """
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return 0.5 * torch.maximum(plain, clipped), clipped > plain
