"""Generalized advantage estimation over many turns (Schulman et al., arXiv 1506.02438, Eq. 16); the critic's loss.

    delta_n = r_n + gamma * V_{n+1} - V_n,      A_n = delta_n + gamma * lambda * A_{n+1}

n counts **decision points**. The credit method defines which tokens they are and where a chain of them ends.
"""

from __future__ import annotations

import torch
from torch import Tensor


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    points: Tensor,
    ends: Tensor,
    end_values: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Returns (B, T) advantages, 0 where there is no decision point.

    Args:
        rewards: (B, T) reward of the decision, read at decision points.
        values: (B, T) value of the state in which the decision was made, read at decision points.
        points: (B, T) boolean, the decision points; those of a row are consecutive regardless of gaps.
        ends: (B, T) boolean, the last decision point of each chain.
        end_values: (B, T) value of the state after the chain, read at `ends`.
        gamma: Discount from one decision point to the next, in [0, 1].
        gae_lambda: lambda, in [0, 1]. 0 looks one point ahead; 1 gives the discounted return minus the value.
    """
    advantages = torch.zeros_like(values)
    later = torch.zeros_like(values[:, 0])  # A_{n+1}
    next_value = torch.zeros_like(later)  # V_{n+1}
    for n in reversed(range(values.shape[1])):
        later = torch.where(ends[:, n], 0.0, later)
        next_value = torch.where(ends[:, n], end_values[:, n], next_value)
        delta = rewards[:, n] + gamma * next_value - values[:, n]
        here = delta + gamma * gae_lambda * later
        advantages[:, n] = torch.where(points[:, n], here, 0.0)
        later = torch.where(points[:, n], here, later)
        next_value = torch.where(points[:, n], values[:, n], next_value)
    return advantages


def rewards_to_go(rewards: Tensor, discounts: Tensor | float) -> Tensor:
    """Returns (B, K) rewards-to-go, `G_k = r_k + d_k * G_{k+1}`.

    Args:
        rewards: (B, K) reward of each turn.
        discounts: (B, K) discounts of the later turns, or one for all.
    """
    discounts = torch.as_tensor(discounts, dtype=rewards.dtype, device=rewards.device).expand_as(rewards)
    sums = torch.zeros_like(rewards)
    later = torch.zeros_like(rewards[:, 0])
    for k in reversed(range(rewards.shape[1])):
        later = rewards[:, k] + discounts[:, k] * later
        sums[:, k] = later
    return sums


def turn_edges(turn_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two (B, T) booleans: the first and the last response token of each turn."""
    mask = response_mask.bool()
    turns = torch.where(mask, turn_ids, -1)
    outside = torch.full_like(turns[:, :1], -1)
    first = mask & (turns != torch.cat([outside, turns[:, :-1]], dim=1))
    last = mask & (turns != torch.cat([turns[:, 1:], outside], dim=1))
    return first, last


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
