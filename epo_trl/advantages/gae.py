"""Generalized advantage estimation over many turns (Schulman et al., arXiv 1506.02438, Eq. 16; PPO, 1707.06347).

    delta_n = r_n + gamma * V_{n+1} - V_n,      A_n = delta_n + gamma * lambda * A_{n+1}

n counts **decision points**. What a decision point is, and where a chain of them ends, is the choice of credit:

- `turn`: one per turn, its first response token. Reward and bootstrapping pass from turn to turn (as in ArCHer, arXiv
  2402.19446), and all tokens of a turn share its advantage.
- `token`: every response token of the episode; what the environment wrote between them is skipped.
- `outcome`: every response token, but each turn is a chain of its own that is paid the episode's whole reward at its
  last token, without bootstrapping. What EPO's release computes; for comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueBatch:
    """Rewards and values of B episodes, as the policy that played them left them.

    Args:
        values: (B, T) the critic's value of the state in which each response token was sampled, in units of reward.
            Other positions are not read.
        turn_rewards: (B, K) reward of each turn, 0 where an episode has fewer.
        final_values: (B,) value of the state after the last turn; 0 for an episode that terminated.
        turn_ids: (B, T) turn of each token, -1 on padding.
        response_mask: (B, T), 1 on sampled tokens.
    """

    values: Tensor
    turn_rewards: Tensor
    final_values: Tensor
    turn_ids: Tensor
    response_mask: Tensor


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the policy and the critic learn from.

    Args:
        advantages: (B, T), 0 where no token was sampled.
        returns: (B, T) targets of the critic, `A + V`; 0 where it has none.
        points: (B, T) boolean, the decision points: where the critic is trained.
    """

    advantages: Tensor
    returns: Tensor
    points: Tensor


CreditRule = Callable[[ValueBatch, float, float], Estimate]


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
        rewards: (B, T) paid for the decision, read at decision points.
        values: (B, T) of the state in which it was made, read at decision points.
        points: (B, T) boolean, the decision points; in a row they follow each other over any gap.
        ends: (B, T) boolean, the decision points that are the last of their chain.
        end_values: (B, T) value of the state after the chain, read at `ends`.
        gamma: Discount from one decision point to the next, in [0, 1].
        gae_lambda: In [0, 1]. 0 looks one point ahead, 1 gives the discounted return minus the value.
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


def turn_edges(turn_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (B, T) booleans: the first and the last response token of each turn."""
    mask = response_mask.bool()
    turns = torch.where(mask, turn_ids, -1)
    outside = torch.full_like(turns[:, :1], -1)
    first = mask & (turns != torch.cat([outside, turns[:, :-1]], dim=1))
    last = mask & (turns != torch.cat([turns[:, 1:], outside], dim=1))
    return first, last


def turn_credit(batch: ValueBatch, gamma: float, gae_lambda: float) -> Estimate:
    """Returns GAE from turn to turn; every token of a turn gets its turn's advantage."""
    first, _ = turn_edges(batch.turn_ids, batch.response_mask)
    advantages = _chained(batch, first, gamma, gae_lambda)
    per_turn = torch.zeros_like(batch.turn_rewards, dtype=advantages.dtype)
    turns = batch.turn_ids.clamp(min=0)
    per_turn.scatter_add_(1, turns, advantages)  # one token of each turn is not 0
    shared = per_turn.gather(1, turns) * batch.response_mask
    return Estimate(shared, torch.where(first, advantages + batch.values, 0.0), first)


def token_credit(batch: ValueBatch, gamma: float, gae_lambda: float) -> Estimate:
    """Returns GAE over all response tokens of the episode; a turn's reward is paid for its last token."""
    points = batch.response_mask.bool()
    advantages = _chained(batch, points, gamma, gae_lambda)
    return Estimate(advantages, torch.where(points, advantages + batch.values, 0.0), points)


def outcome_credit(batch: ValueBatch, gamma: float, gae_lambda: float) -> Estimate:
    """Returns GAE inside each turn, which is paid the episode's whole reward; nothing passes between turns.

    `final_values` are not read: the release has no bootstrapping.
    """
    points = batch.response_mask.bool()
    _, last = turn_edges(batch.turn_ids, points)
    total = batch.turn_rewards.sum(1, keepdim=True).expand_as(batch.values)
    rewards = torch.where(last, total, 0.0)
    zeros = torch.zeros_like(batch.values)
    advantages = generalized_advantages(
        rewards, batch.values, points, last, zeros, gamma=gamma, gae_lambda=gae_lambda
    )  # fmt: skip
    return Estimate(advantages, torch.where(points, advantages + batch.values, 0.0), points)


CREDITS: dict[str, CreditRule] = {"turn": turn_credit, "token": token_credit, "outcome": outcome_credit}


def _chained(batch: ValueBatch, points: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Returns advantages over one chain per episode, each turn paid at its last decision point."""
    _, last_of_turn = turn_edges(batch.turn_ids, points)
    paid = batch.turn_rewards.gather(1, batch.turn_ids.clamp(min=0))
    ends = points & (points.flip(1).cumsum(1).flip(1) == 1)
    return generalized_advantages(
        torch.where(last_of_turn, paid, 0.0),
        batch.values,
        points,
        ends,
        batch.final_values.unsqueeze(1).expand_as(batch.values),
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
