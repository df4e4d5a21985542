"""Means over tokens, turns and trajectories, expressed as one weight per token."""

from __future__ import annotations

import torch
from torch import Tensor

from epo_trl.errors import InputError


def turn_mean_weights(
    turn_ids: Tensor,
    response_mask: Tensor,
    *,
    num_trajectories: Tensor | float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns weights that turn a sum over tokens into the mean over trajectories, turns and response tokens.

    `(weights * H).sum()` is L_H of EPO (arXiv 2509.22576, Eq. 4): the mean over trajectories of the mean over each
    trajectory's own turns of the mean over that turn's response tokens. A trajectory without a response token is
    excluded from the sum and from the mean. The weights carry no gradient.

    Args:
        turn_ids: (B, T) integers, the turn of each token; -1 on padding. Environment tokens may have a turn id.
        response_mask: (B, T), 1 on the tokens that the policy sampled.
        num_trajectories: Number of trajectories to average over. Defaults to those in this batch with a response token.
            For a part of a batch, pass the number in the whole batch: the sums over the parts then add up to the mean
            over the whole, however it was split.
        dtype: Floating-point type of the weights.

    Raises:
        ValueError: If the shapes differ, or a response token has no turn. The second check runs on the CPU only; on a
            GPU it would force a synchronization.
    """
    if turn_ids.shape != response_mask.shape or turn_ids.dim() != 2:
        raise InputError(
            f"turn_ids, response_mask: expected the same shape (B, T), got {tuple(turn_ids.shape)} and "
            f"{tuple(response_mask.shape)}"
        )
    mask = response_mask.bool()
    if turn_ids.device.type == "cpu" and bool((mask & (turn_ids < 0)).any()):
        raise InputError("turn_ids: expected >= 0 on every response token, got a response token with turn id -1")
    if turn_ids.numel() == 0:
        return torch.zeros(turn_ids.shape, dtype=dtype, device=turn_ids.device)

    turns = _numbered(turn_ids)
    # Count in float32 or wider: bfloat16 cannot represent all integers above 256.
    counting = torch.promote_types(dtype, torch.float32)
    tokens_per_turn = torch.zeros(turn_ids.shape, dtype=counting, device=turn_ids.device)
    tokens_per_turn.scatter_add_(1, turns, mask.to(counting))  # n_{j,t}
    turns_per_row = (tokens_per_turn > 0).sum(1, keepdim=True)  # T_j
    per_token = (tokens_per_turn.gather(1, turns) * turns_per_row).clamp(min=1)
    rows = (turns_per_row > 0).sum().clamp(min=1) if num_trajectories is None else num_trajectories  # B
    return (mask / per_token / rows).to(dtype)


def turn_means(values: Tensor, turn_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Returns (B, T): at each token, the mean of `values` over the response tokens of its turn. Differentiable.

    It is 0 in a turn without response tokens, and undefined on padding.

    Args:
        values: (B, T) value of each token.
        turn_ids: (B, T) integers, the turn of each token; -1 on padding.
        response_mask: (B, T), 1 on the tokens that count.
    """
    turns, mask = _numbered(turn_ids), response_mask.to(values.dtype)
    sums = torch.zeros_like(values)
    counts = sums.scatter_add(1, turns, mask).clamp(min=1)
    return (sums.scatter_add(1, turns, values * mask) / counts).gather(1, turns)


def _numbered(turn_ids: Tensor) -> Tensor:
    """Returns (B, T) indices from 0 to T - 1 equal for tokens of the same turn in a row. Padding counts as turn 0.

    All turns of a row then fit into T columns without knowing their number. Reading the largest index from a device
    would force a synchronization.
    """
    turns = turn_ids.clamp(min=0).contiguous()
    return torch.searchsorted(turns.sort(1).values, turns)
