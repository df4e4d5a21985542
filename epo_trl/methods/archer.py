"""ArCHer's credit (arXiv 2402.19446): a turn against its state, by critics that learn from earlier batches too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from epo_trl.methods.base import Batch, Credit, Need, StepSummary
from epo_trl.methods.tally import Tallied, Tally
from epo_trl.methods.token_statistics import on_tokens
from epo_trl.methods.twin_critics import CriticSettings, Transitions, TwinCritics
from epo_trl.types import StopReason

ENDED = (StopReason.WON, StopReason.LOST)


@dataclass
class ArCHer(Tallied):
    """`A = min(Q_1, Q_2) - min(V_1, V_2)`, equal for all tokens of a turn.

    Where it differs from the source: the critics read what the frozen policy at the start of RL makes of a turn, and
    have no RoBERTa of their own to train, so what is in the replay stays true; V is drawn to Q at the replayed action,
    not at one that the policy samples anew; the policy learns from the new batch alone, through TRL's loss.

    Args:
        gamma: Discount from turn to turn. The source's 0.9.
        polyak: Share of the critics that the targets take up in each update of them. The source's 0.1.
        learning_rate: Of the critics' Adam. The source's 1e-3.
        critic_epochs: Passes through the replay in each RL step. The source's 3, of another kind: see docs/credit.md.
        warmup_rl_steps: First RL steps in which all advantages are 0. The source's code has 20.
        replay_size: Turns that are kept, the newest of all ranks. Ours; the source keeps them all.
        batch_size: Turns of an update. Ours.
        hidden_size: Width of the two hidden layers of each critic. Ours.
        cut_ends: Whether an episode that was cut off counts as ended, as in the source's code; false leaves its last
            turn out of the replay, since what came after it is not known.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.FEATURES, Need.TURN_REWARDS})
    config_fields: ClassVar[tuple[str, ...]] = ("seed",)

    seed: int = 0
    gamma: float = 0.9
    polyak: float = 0.1
    learning_rate: float = 1e-3
    critic_epochs: int = 3
    warmup_rl_steps: int = 0
    replay_size: int = 10_000
    batch_size: int = 64
    hidden_size: int = 256
    cut_ends: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma: got {self.gamma}, takes a number from 0 to 1")
        if not 0 < self.polyak <= 1:
            raise ValueError(f"polyak: got {self.polyak}, takes a number above 0, up to 1")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate: got {self.learning_rate}, takes a number > 0")
        for name in ("critic_epochs", "replay_size", "batch_size", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes an integer >= 1")
        if self.warmup_rl_steps < 0:
            raise ValueError(f"warmup_rl_steps: got {self.warmup_rl_steps}, takes an integer >= 0")
        self.critics: TwinCritics | None = None  # made of the first turns
        # RL steps, Q losses, V losses; turns, Q, V, advantages, their squares.
        self.tally = Tally(8)

    def described(self) -> str:
        """Returns name and paper."""
        return "[ArCHer](https://arxiv.org/abs/2402.19446)"

    def credit(self, batch: Batch) -> Credit:
        """Returns one advantage per turn, by critics that have learned from the batch and those before. Collective."""
        per_turn = torch.zeros_like(batch.turn_rewards)
        losses = self._learn(batch)
        if self.critics is None or losses is None:
            return Credit(on_tokens(per_turn, batch) * batch.mask)
        assert batch.features is not None
        there = batch.features.there
        with torch.no_grad(), torch.autocast(per_turn.device.type, enabled=False):
            states, actions = batch.features.states[there], batch.features.actions[there]
            q, v = self.critics.q(states, actions).amin(0), self.critics.v(states).amin(0)
        advantages = q - v
        sums = torch.stack([x.double().sum() for x in (q, v, advantages, advantages.square())])
        self.tally.add(1.0, *losses, len(q), *sums.tolist())
        if batch.rl_step >= self.warmup_rl_steps:
            per_turn[there] = advantages
        return Credit(on_tokens(per_turn, batch) * batch.mask)

    def _learn(self, batch: Batch) -> tuple[float, float] | None:
        """Adds the batch of all ranks to the replay and trains; returns the losses, `None` if there is no turn yet."""
        parts = batch.ranks.gather([transitions(batch, cut_ends=self.cut_ends).to("cpu")])
        new = Transitions.joined(parts).to(batch.turn_rewards.device)
        if self.critics is None:
            if not len(new):
                return None
            self.critics = TwinCritics(self._settings, new)
        self.critics.add(new)
        return self.critics.learn(batch.rl_step)

    @property
    def _settings(self) -> CriticSettings:
        return CriticSettings(**{name: getattr(self, name) for name in CriticSettings.__dataclass_fields__})

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        """Returns what the critics think of the batch, and how well they fit the replay."""
        steps, q_loss, v_loss, turns, q, v, advantage, squared = self.tally.take(step.ranks)
        steps, turns = max(steps, 1), max(turns, 1)
        return {
            "archer/q_loss": q_loss / steps,
            "archer/v_loss": v_loss / steps,
            "archer/q": q / turns,
            "archer/v": v / turns,
            "archer/advantage": advantage / turns,
            "archer/advantage_std": math.sqrt(max(squared / turns - (advantage / turns) ** 2, 0.0)),
            "archer/replay_turns": float(len(self.critics.replay)) if self.critics else 0.0,
        }

    def learned_state(self) -> dict[str, Any]:
        """Returns the critics and the replay."""
        return self.critics.state_dict() if self.critics else {}

    def load_learned_state(self, state: Mapping[str, Any]) -> None:
        """Takes them up."""
        self.critics = TwinCritics.from_state(self._settings, state)


def transitions(batch: Batch, *, cut_ends: bool) -> Transitions:
    """Returns the turns of this rank's episodes, episode by episode.

    Args:
        batch: With features.
        cut_ends: See `ArCHer`.
    """
    assert batch.features is not None
    states, actions, there = batch.features.states, batch.features.actions, batch.features.there
    last = there & ~torch.cat([there[:, 1:], torch.zeros_like(there[:, :1])], dim=1)
    cut = torch.tensor([episode.stop not in ENDED for episode in batch.episodes], device=there.device)
    known = there if cut_ends else there & ~(last & cut.unsqueeze(1))
    next_states = torch.cat([states[:, 1:], torch.zeros_like(states[:, :1])], dim=1)
    parts: list[Tensor] = [states, actions, batch.turn_rewards.float(), next_states, last]
    return Transitions(*(part[known] for part in parts))
