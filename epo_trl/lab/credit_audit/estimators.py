"""The credits that an audit compares, and the advantage that each gives to the turns of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor

from epo_trl.methods import METHODS, Batch, CriticValues, Method, Need
from epo_trl.methods.anchors import Anchored
from epo_trl.methods.gae import TurnGAE
from epo_trl.methods.registry import load_class
from epo_trl.methods.token_statistics import per_turn_means
from epo_trl.trainers.step import equal_within_groups
from epo_trl.types import Episode

_LAST_OBSERVATIONS = 3


def list_estimators(
    *,
    state_keys: bool,
    gae: Mapping[str, float] | None,
    two_heads: Mapping[str, float] | None = None,
) -> tuple[dict[str, Method], dict[str, str]]:
    """Returns the credits of the registry by name, with variants, and the reasons why others are left out.

    A credit that compares turns by what the agent saw also appears with the last three observations and, if the
    environment names its states (`state_keys`), with these. `gae` has `gamma` and `gae_lambda` of the run's critic,
    `two_heads` further settings of the credit of a critic with two heads; each is `None` without such a critic.
    """
    found: dict[str, Method] = {}
    left_out: dict[str, str] = {}
    for name in METHODS["credit"]:
        kind = load_class("credit", name)
        if reason := _why_not(kind, has_critic=gae is not None, has_two_heads=two_heads is not None):
            left_out[name] = reason
        elif Need.VALUES in kind.needs:
            found[name] = kind(**(gae or {}), **((two_heads or {}) if kind.token_weight else {}))
        else:
            found[name] = kind()
        if name in found and issubclass(kind, Anchored):
            if kind().anchor_turns < _LAST_OBSERVATIONS:
                found[f"{name}, last {_LAST_OBSERVATIONS}"] = kind(anchor_turns=_LAST_OBSERVATIONS)
            if state_keys:
                found[f"{name}, state"] = kind(anchor="state")
    if gae is not None:
        found["turn, lambda 0"] = TurnGAE(gamma=gae["gamma"], gae_lambda=0.0)
    return found, left_out


def _why_not(kind: type[Any], *, has_critic: bool, has_two_heads: bool) -> str:
    reasons = {
        "the run has no critic": Need.VALUES in kind.needs and not has_critic,
        "the run's critic has one head": kind.token_weight and not has_two_heads,
        "the run's critic has other values inside a turn": (
            Need.VALUES in kind.needs and has_two_heads and kind is not TurnGAE and not kind.token_weight
        ),
        "its critics are not read": Need.FEATURES in kind.needs,
        "it learns from other rewards": kind.turn_rewards is not Method.turn_rewards,
        "it has settings without a default": any(
            entry.init and entry.default is MISSING and entry.default_factory is MISSING for entry in fields(kind)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def build_batch(
    episodes: Sequence[Episode],
    group_size: int,
    scale: str,
    critic: CriticValues | None = None,
) -> Batch:
    """Returns the batch that the credits read, with the response tokens of each episode in one row.

    Episodes of a task are adjacent. `scale` is what divides GRPO's advantages: the deviation of the "group", of the
    "batch", or "none".
    """
    rows = [[k for k, turn in enumerate(episode.turns) for _ in turn.response_ids] for episode in episodes]
    turn_ids = _padded(rows, -1).long()
    rewards = _padded([[turn.reward for turn in episode.turns] for episode in episodes], 0.0)
    return Batch(
        episodes=episodes,
        group_ids=torch.arange(len(episodes)) // group_size,
        turn_rewards=rewards,
        group_advantages=_relative(rewards.sum(1).view(-1, group_size), scale).flatten(),
        turn_ids=turn_ids,
        mask=(turn_ids >= 0).long(),
        critic=critic,
    )


def _padded(rows: Sequence[Sequence[float]], value: float) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], True, value)


def _relative(returns: Tensor, scale: str) -> Tensor:
    """Returns (groups, members) advantages as a trainer has them from the episodes' rewards."""
    equal = equal_within_groups(returns.reshape(-1, 1), returns.shape[1])
    centred = (returns - returns.mean(1, keepdim=True)).masked_fill(equal.unsqueeze(1), 0.0)
    if scale == "none":
        return centred
    deviation = returns.std(1, keepdim=True) if scale == "group" else returns.std()
    return centred / (deviation + 1e-4)


def turn_credits(
    estimators: Mapping[str, Method], batch: Batch, turns: Sequence[tuple[int, int]]
) -> dict[str, list[float]]:
    """Returns the mean advantage that each credit gives to the tokens of some turns, `(row, turn)`."""
    credits = {}
    for name, method in estimators.items():
        means, _ = per_turn_means(method.credit(batch).advantages, batch)
        credits[name] = [float(means[row, turn]) for row, turn in turns]
    return credits
