"""ArCHer's credit (arXiv 2402.19446): the advantage of a turn over its state, from critics trained off-policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epo_trl.bounds import CountOrZero
from epo_trl.methods.base import Batch, Credit, Method, Need, StepSummary, Tally
from epo_trl.methods.token_statistics import on_tokens
from epo_trl.methods.twin_critics import CriticSettings, Transitions, TwinCritics
from epo_trl.types import StopReason

ENDED = (StopReason.WON, StopReason.LOST)


@dataclass
class ArCHer(CriticSettings, Method):
    """`A = min(Q_1, Q_2) - min(V_1, V_2)`, equal for all tokens of a turn.

    It differs from the source in three ways. The critics read the reference policy's hidden states of a turn instead of
    training a RoBERTa, so transitions in the replay buffer never go stale. V regresses to Q at the replayed action, not
    at an action resampled from the policy. The policy learns from the new batch alone, through TRL's loss.

    Args, beside those of `CriticSettings`:
        warmup_rl_steps: Number of initial RL steps in which all advantages are 0. The source's code uses 20.
        cut_ends: Whether to treat a truncated episode as terminated, as in the source's code. With false, its last turn
            is not stored, because its next state is unknown.
    """

    card = "[ArCHer](https://arxiv.org/abs/2402.19446)"
    needs = {Need.FEATURES, Need.TURN_REWARDS}
    config_fields = ("seed",)

    warmup_rl_steps: CountOrZero = 0
    cut_ends: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.critics: TwinCritics | None = None  # created from the first turns
        self.tally = Tally("rl_steps", "q_loss", "v_loss", "turns", "q", "v", "advantage", "squared_advantage")

    def credit(self, batch: Batch) -> Credit:
        """Trains the critics on this batch and the replay buffer, and returns one advantage per turn. Collective."""
        per_turn = torch.zeros_like(batch.turn_rewards)
        losses = self._learn(batch)
        if self.critics is None or losses is None:
            return Credit(on_tokens(per_turn, batch) * batch.mask)
        turn_mask = batch.features.turn_mask
        with torch.no_grad(), torch.autocast(per_turn.device.type, enabled=False):
            states, actions = batch.features.states[turn_mask], batch.features.actions[turn_mask]
            q, v = self.critics.q(states, actions).amin(0), self.critics.v(states).amin(0)
        advantages = q - v
        self.tally.add(
            rl_steps=1,
            q_loss=losses[0],
            v_loss=losses[1],
            turns=len(q),
            q=q.double().sum(),
            v=v.double().sum(),
            advantage=advantages.double().sum(),
            squared_advantage=advantages.square().double().sum(),
        )
        if batch.rl_step >= self.warmup_rl_steps:
            per_turn[turn_mask] = advantages
        return Credit(on_tokens(per_turn, batch) * batch.mask)

    def _learn(self, batch: Batch) -> tuple[float, float] | None:
        """Adds the batch of all ranks to the replay buffer and trains; returns the losses, or `None` without a turn."""
        parts = batch.ranks.gather([transitions(batch, cut_ends=self.cut_ends).to("cpu")])
        new = Transitions.concatenate(parts).to(batch.turn_rewards.device)
        if self.critics is None:
            if not len(new):
                return None
            self.critics = TwinCritics(self, new)
        self.critics.add(new)
        return self.critics.learn(batch.rl_step)

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        """Returns the critics' mean estimates on the batch and their losses on the replay buffer."""
        sums = self.tally.take(step.ranks)
        steps, turns = max(sums["rl_steps"], 1), max(sums["turns"], 1)
        advantage = sums["advantage"] / turns
        return {
            "archer/q_loss": sums["q_loss"] / steps,
            "archer/v_loss": sums["v_loss"] / steps,
            "archer/q": sums["q"] / turns,
            "archer/v": sums["v"] / turns,
            "archer/advantage": advantage,
            "archer/advantage_std": math.sqrt(max(sums["squared_advantage"] / turns - advantage**2, 0.0)),
            "archer/replay_turns": float(len(self.critics.replay)) if self.critics else 0.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the critics and the replay buffer."""
        return self.critics.state_dict() if self.critics else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the critics and the replay buffer."""
        self.critics = TwinCritics.from_state(self, state)


def transitions(batch: Batch, *, cut_ends: bool) -> Transitions:
    """Returns the turns of this rank's episodes as transitions, episode by episode.

    Args:
        batch: A batch with features.
        cut_ends: See `ArCHer`.
    """
    states, actions, turn_mask = batch.features.states, batch.features.actions, batch.features.turn_mask
    last = turn_mask & ~torch.cat([turn_mask[:, 1:], torch.zeros_like(turn_mask[:, :1])], dim=1)
    cut = torch.tensor([episode.stop not in ENDED for episode in batch.episodes], device=turn_mask.device)
    known = turn_mask if cut_ends else turn_mask & ~(last & cut.unsqueeze(1))
    next_states = torch.cat([states[:, 1:], torch.zeros_like(states[:, :1])], dim=1)
    parts: list[Tensor] = [states, actions, batch.turn_rewards.float(), next_states, last]
    return Transitions(*(part[known] for part in parts))
