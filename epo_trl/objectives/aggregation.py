"""Means over tokens, turns and trajectories as one weight per token."""

from __future__ import annotations

import torch
from torch import Tensor


def turn_mean_weights(
    turn_ids: Tensor,
    response_mask: Tensor,
    *,
    num_trajectories: Tensor | float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns weights with which a sum over tokens is the mean over trajectories, turns and response tokens.

    `(weights * H).sum()` is L_H of EPO (arXiv 2509.22576, Eq. 4): the mean over trajectories of the mean over each
    trajectory's own turns of the mean over that turn's response tokens. A trajectory without a response token counts
    neither in the sum nor in the mean. Weights carry no gradient.

    Args:
        turn_ids: (B, T) integers, the turn of each token; -1 on padding. Environment tokens may carry a turn id.
        response_mask: (B, T), 1 on the tokens that the policy sampled.
        num_trajectories: Number of trajectories to average over. By default those of this batch that have a response
            token. For a part of a batch pass the number in the whole batch: the sums over the parts then add up to
            the mean over the whole, however it was cut.
        dtype: Floating type of the weights.

    Raises:
        ValueError: If the shapes differ, or a response token has no turn. The latter is looked for on the CPU alone: a
            GPU would have to finish all work before it.
    """
    if turn_ids.shape != response_mask.shape or turn_ids.dim() != 2:
        raise ValueError(
            f"turn_ids and response_mask: got {tuple(turn_ids.shape)} and {tuple(response_mask.shape)}, "
            "both take the same (B, T)"
        )
    mask = response_mask.bool()
    if turn_ids.device.type == "cpu" and bool((mask & (turn_ids < 0)).any()):
        raise ValueError("turn_ids: a response token has turn id -1; every response token belongs to a turn >= 0")
    if turn_ids.numel() == 0:
        return torch.zeros(turn_ids.shape, dtype=dtype, device=turn_ids.device)

    turns = _numbered(turn_ids)
    # Counted in float32 at least: bfloat16 cannot count beyond 256.
    counting = torch.promote_types(dtype, torch.float32)
    tokens_per_turn = torch.zeros(turn_ids.shape, dtype=counting, device=turn_ids.device)
    tokens_per_turn.scatter_add_(1, turns, mask.to(counting))  # n_{j,t}
    turns_per_row = (tokens_per_turn > 0).sum(1, keepdim=True)  # T_j
    per_token = (tokens_per_turn.gather(1, turns) * turns_per_row).clamp(min=1)
    rows = (turns_per_row > 0).sum().clamp(min=1) if num_trajectories is None else num_trajectories  # B
    return (mask / per_token / rows).to(dtype)


def turn_means(values: Tensor, turn_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Returns (B, T), at each token of a turn the mean of `values` over the turn's response tokens. Differentiable.

    It is 0 in a turn without a response token, and means nothing on padding.

    Args:
        values: (B, T).
        turn_ids: (B, T) integers, the turn of each token; -1 on padding.
        response_mask: (B, T), 1 on the tokens that count.
    """
    turns, mask = _numbered(turn_ids), response_mask.to(values.dtype)
    sums = torch.zeros_like(values)
    counts = sums.scatter_add(1, turns, mask).clamp(min=1)
    return (sums.scatter_add(1, turns, values * mask) / counts).gather(1, turns)


def _numbered(turn_ids: Tensor) -> Tensor:
    """Returns (B, T) numbers from 0 to T - 1, equal where two tokens of a row are of one turn. Padding is of turn 0.

    So there is room for all turns in T columns, and nobody has to know how many there are: a device that is asked for
    the largest index first has to finish all work before it.
    """
    turns = turn_ids.clamp(min=0).contiguous()
    return torch.searchsorted(turns.sort(1).values, turns)
