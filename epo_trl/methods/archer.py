"""ArCHer's credit (arXiv 2402.19446): the advantage of a turn over its state, from critics trained off-policy."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from epo_trl.bounds import Count, CountOrZero, Positive, PositiveShare, Share
from epo_trl.methods.base import Batch, Credit, Method, Need, StepSummary, Tally
from epo_trl.methods.token_statistics import on_tokens
from epo_trl.types import StopReason

ENDED = (StopReason.WON, StopReason.LOST)
FEATURE_CLIP = 5.0  # features are clipped at this many standard deviations


@dataclass
class ArCHer(Method):
    """`A = min(Q_1, Q_2) - min(V_1, V_2)`, equal for all tokens of a turn.

    The critics read the reference policy's hidden states of a turn, so transitions in the replay buffer never go stale.
    docs/methods.md lists what differs from the source.

    Args:
        seed: Seed of the critics' weights and of the order of the transitions.
        gamma: Discount from turn to turn. The source uses 0.9.
        polyak: Step size of the target critics towards the critics in each update. The source uses 0.1.
        learning_rate: Learning rate of the critics' Adam. The source uses 1e-3.
        critic_epochs: Passes over the replay buffer in each RL step. The source's code makes 3 updates, each on a
            sample of the buffer.
        replay_size: Number of turns in the replay buffer, the newest of all ranks.
        batch_size: Number of turns per update.
        hidden_size: Width of the two hidden layers of each critic. Not in the source.
        warmup_rl_steps: Number of initial RL steps in which all advantages are 0. The source's code uses 20.
        cut_ends: Whether a truncated episode counts as terminated; if not, its last turn is not stored.
    """

    card = "[ArCHer](https://arxiv.org/abs/2402.19446)"
    needs = {Need.FEATURES, Need.TURN_REWARDS}
    config_fields = ("seed",)

    seed: int = 0
    gamma: Share = 0.9
    polyak: PositiveShare = 0.1
    learning_rate: Positive = 1e-3
    critic_epochs: Count = 3
    replay_size: Count = 10_000
    batch_size: Count = 64
    hidden_size: Count = 256
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
        own = Transitions(*(part.cpu() for part in transitions(batch, cut_ends=self.cut_ends)))
        new = Transitions(*(part.to(batch.turn_rewards.device) for part in concatenate(batch.ranks.gather([own]))))
        if self.critics is None:
            if not len(new.rewards):
                return None
            self.critics = TwinCritics(self, new)
        self.critics.add(new)
        return self.critics.learn(batch.rl_step)

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
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
            "archer/replay_turns": float(len(self.critics.replay.rewards)) if self.critics else 0.0,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.critics.state_dict() if self.critics else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.critics = TwinCritics.from_state(self, state)


class Transitions(NamedTuple):
    """n transitions from turn to turn.

    Args:
        states: (n, D) features of the text that the agent saw.
        actions: (n, D) features of its response.
        rewards: (n,) reward of each turn.
        next_states: (n, D) features of the next text, read where `ends` is false.
        ends: (n,) boolean, true for the last turn of an episode.
    """

    states: Tensor
    actions: Tensor
    rewards: Tensor
    next_states: Tensor
    ends: Tensor

    def rows(self, index: Any) -> Transitions:
        """Returns the selected transitions."""
        return Transitions(*(part[index] for part in self))


def concatenate(parts: Iterable[Transitions]) -> Transitions:
    """Concatenates transitions."""
    return Transitions(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def transitions(batch: Batch, *, cut_ends: bool) -> Transitions:
    """Returns the turns of this rank's episodes as transitions, episode by episode; `cut_ends` as in `ArCHer`."""
    states, actions, turn_mask = batch.features.states, batch.features.actions, batch.features.turn_mask
    last = turn_mask & ~torch.cat([turn_mask[:, 1:], torch.zeros_like(turn_mask[:, :1])], dim=1)
    cut = torch.tensor([episode.stop not in ENDED for episode in batch.episodes], device=turn_mask.device)
    known = turn_mask if cut_ends else turn_mask & ~(last & cut.unsqueeze(1))
    next_states = torch.cat([states[:, 1:], torch.zeros_like(states[:, :1])], dim=1)
    return Transitions(states, actions, batch.turn_rewards.float(), next_states, last).rows(known)


class Heads(nn.Module):
    """Two Q networks of (state, action) and two V networks of a state of width D, all 0 at initialization.

    `seed` is that of the weights before the last layer. Global random state is neither read nor changed.
    """

    def __init__(self, width: int, hidden_size: int, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def head(inputs: int) -> nn.Sequential:
            sizes = (inputs, hidden_size, hidden_size, 1)
            layers = [nn.utils.skip_init(nn.Linear, a, b) for a, b in zip(sizes, sizes[1:], strict=False)]
            for layer in layers:
                nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=generator)
                nn.init.zeros_(layer.bias)
            nn.init.zeros_(layers[-1].weight)
            return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

        self.q_heads = nn.ModuleList([head(2 * width), head(2 * width)])
        self.v_heads = nn.ModuleList([head(width), head(width)])

    def q(self, states: Tensor, actions: Tensor) -> Tensor:
        """Returns (2, n) values of state-action pairs."""
        both = torch.cat([states, actions], dim=-1)
        return torch.stack([head(both).squeeze(-1) for head in self.q_heads])

    def v(self, states: Tensor) -> Tensor:
        """Returns (2, n) values of states."""
        return torch.stack([head(states).squeeze(-1) for head in self.v_heads])


class TwinCritics:
    """The critics (Sec. 3 of the paper) with their target networks, optimizer and replay buffer.

    Copies on several ranks stay equal, since they receive the same data and draw the same random numbers. Features are
    standardised with the statistics of the first batch, which stay fixed so that stored transitions remain comparable.
    """

    def __init__(self, settings: ArCHer, first: Transitions):
        self.settings = settings
        seen = [first.states, first.actions]
        self.center = torch.stack([x.mean(0) for x in seen])
        spread = torch.stack([x.std(0, correction=0) for x in seen])
        typical = spread.square().mean(1, keepdim=True).sqrt()
        self.scale = torch.maximum(spread, 0.1 * typical).clamp(min=1e-6)
        self.heads = Heads(first.states.shape[1], settings.hidden_size, settings.seed).to(first.states.device)
        self.targets = copy.deepcopy(self.heads).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.heads.parameters(), lr=settings.learning_rate)
        self.replay = first.rows(slice(0))

    def _scaled(self, features: Tensor, which: int) -> Tensor:
        return ((features - self.center[which]) / self.scale[which]).clamp(-FEATURE_CLIP, FEATURE_CLIP)

    def q(self, states: Tensor, actions: Tensor, heads: Heads | None = None) -> Tensor:
        """Returns (2, n) values of turns, differentiable with respect to the heads."""
        return (heads or self.heads).q(self._scaled(states, 0), self._scaled(actions, 1))

    def v(self, states: Tensor, heads: Heads | None = None) -> Tensor:
        """Returns (2, n) values of states, differentiable with respect to the heads."""
        return (heads or self.heads).v(self._scaled(states, 0))

    @torch.no_grad()
    def regression_targets(self, some: Transitions) -> tuple[Tensor, Tensor]:
        """Returns the (2, n) regression targets of Q and V: `r + gamma V'(next state)`, without V' at an end, and `Q'`.

        Primes denote the target networks. Each twin has its own, as in the paper's code.
        """
        later = self.v(some.next_states, self.targets) * ~some.ends
        return some.rewards + self.settings.gamma * later, self.q(some.states, some.actions, self.targets)

    def add(self, new: Transitions) -> None:
        """Adds transitions to the replay buffer, which drops the oldest."""
        self.replay = concatenate([self.replay, new]).rows(slice(-self.settings.replay_size, None))

    def learn(self, rl_step: int) -> tuple[float, float]:
        """Makes `critic_epochs` passes over the replay buffer; returns the mean losses of Q and V over the updates."""
        generator = torch.Generator().manual_seed(1_000_003 * (rl_step + 1) + self.settings.seed)
        losses: list[Tensor] = []
        device, turns = self.replay.rewards.device, len(self.replay.rewards)
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            for _ in range(self.settings.critic_epochs):
                order = torch.randperm(turns, generator=generator).to(device)
                losses += [self.update(self.replay.rows(rows)) for rows in order.split(self.settings.batch_size)]
        q_loss, v_loss = torch.stack(losses).mean(0).tolist()
        return q_loss, v_loss

    def update(self, some: Transitions) -> Tensor:
        """Takes one Adam step and updates the targets; returns the (2,) mean squared errors of Q and V before it."""
        q_goal, v_goal = self.regression_targets(some)
        q_loss = (self.q(some.states, some.actions) - q_goal).square().mean()
        v_loss = (self.v(some.states) - v_goal).square().mean()
        self.optimizer.zero_grad()
        (2 * (q_loss + v_loss)).backward()  # the sum over the twins
        self.optimizer.step()
        with torch.no_grad():
            for target, own in zip(self.targets.parameters(), self.heads.parameters(), strict=True):
                target.lerp_(own, self.settings.polyak)
        return torch.stack([q_loss, v_loss]).detach()

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that changes during training."""
        parts = {name: getattr(self, name).state_dict() for name in ("heads", "targets", "optimizer")}
        return {"center": self.center, "scale": self.scale, "replay": list(self.replay), **parts}

    @classmethod
    def from_state(cls, settings: ArCHer, state: Mapping[str, Any]) -> TwinCritics:
        """Returns the saved critics, with these settings from now on."""
        replay = Transitions(*state["replay"])
        critics = cls(settings, replay)
        critics.center, critics.scale, critics.replay = state["center"], state["scale"], replay
        for name in ("heads", "targets", "optimizer"):
            getattr(critics, name).load_state_dict(state[name])
        for group in critics.optimizer.param_groups:
            group["lr"] = settings.learning_rate
        return critics
