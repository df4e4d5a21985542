"""What the critic minimises."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the squared error of each value, halved, and where clipping decided it.

    `0.5 * max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2)`, as in OpenAI's PPO: no gain from moving a
    value further than `clip` from where it was when the batch was collected.

    Args:
        values: Any shape, in units of reward. The loss is differentiable in them.
        old_values: Same shape, at collection time.
        returns: Same shape, the targets.
        clip: In units of reward; `None` for the plain squared error.
    """
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return 0.5 * torch.maximum(plain, clipped), clipped > plain
