"""ArCHer's critics (arXiv 2402.19446, Sec. 3): two Q and two V over whole turns, trained off-policy from a replay."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from epo_trl.bounds import Count, Positive, PositiveShare, Share
from epo_trl.errors import InputError

FEATURE_CLIP = 5.0  # features are clipped at this many standard deviations


@dataclass(frozen=True)
class Transitions:
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

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def fields(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of the fields."""
        return tuple(vars(self).values())

    def rows(self, index: Any) -> Transitions:
        """Returns the selected transitions."""
        return Transitions(*(field[index] for field in self.fields))

    def to(self, device: Any) -> Transitions:
        """Returns the transitions on a device."""
        return Transitions(*(field.to(device) for field in self.fields))

    @staticmethod
    def concatenate(parts: Sequence[Transitions]) -> Transitions:
        """Concatenates transitions."""
        return Transitions(*(torch.cat(fields) for fields in zip(*(part.fields for part in parts), strict=True)))


@dataclass
class CriticSettings:
    """Settings of the critics.

    Args:
        seed: Seed of the weights and of the order of the transitions.
        gamma: Discount from turn to turn. The source uses 0.9.
        polyak: Step size of the target critics towards the critics in each update. The source uses 0.1.
        learning_rate: Learning rate of the critics' Adam. The source uses 1e-3.
        critic_epochs: Passes over the replay buffer in each RL step. The source's code makes 3 updates, each on a
            sample of the buffer.
        replay_size: Number of turns in the replay buffer, the newest of all ranks. The source's code keeps 500,000.
        batch_size: Number of turns per update.
        hidden_size: Width of the two hidden layers of each critic. Not in the source.
    """

    seed: int = 0
    gamma: Share = 0.9
    polyak: PositiveShare = 0.1
    learning_rate: Positive = 1e-3
    critic_epochs: Count = 3
    replay_size: Count = 10_000
    batch_size: Count = 64
    hidden_size: Count = 256


class Heads(nn.Module):
    """Two Q networks of (state, action) and two V networks of a state, all 0 at initialization.

    Args:
        width: D.
        hidden_size: Width of the two hidden layers of each network.
        seed: Seed of the weights before the last layer. Global random state is neither read nor changed.
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
    """The critics with their target networks, optimizer and replay buffer. Copies on several ranks stay equal, since
    they receive the same data and draw the same random numbers.

    Features are standardised with the statistics of the first batch, which stay fixed so that stored transitions remain
    comparable.

    Args:
        settings: Settings of the critics.
        first: The first transitions. They determine the size, center and scale of the features.
    """

    def __init__(self, settings: CriticSettings, first: Transitions):
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

    # --- Values -------------------------------------------------------------------------------------------------

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

    # --- Learning -----------------------------------------------------------------------------------------------

    def add(self, new: Transitions) -> None:
        """Adds transitions to the replay buffer, which drops the oldest."""
        self.replay = Transitions.concatenate([self.replay, new]).rows(slice(-self.settings.replay_size, None))

    def learn(self, rl_step: int) -> tuple[float, float]:
        """Makes `critic_epochs` passes over the replay buffer; returns the mean losses of Q and V over the updates.

        Args:
            rl_step: Index of the RL step. With the seed, it determines the order of the transitions.
        """
        generator = torch.Generator().manual_seed(1_000_003 * (rl_step + 1) + self.settings.seed)
        losses: list[Tensor] = []
        device = self.replay.rewards.device
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            for _ in range(self.settings.critic_epochs):
                order = torch.randperm(len(self.replay), generator=generator).to(device)
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

    # --- Checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that changes during training."""
        parts = {name: getattr(self, name).state_dict() for name in ("heads", "targets", "optimizer")}
        return {"center": self.center, "scale": self.scale, "replay": list(self.replay.fields), **parts}

    @classmethod
    def from_state(cls, settings: CriticSettings, state: Mapping[str, Any]) -> TwinCritics:
        """Returns the saved critics, with these settings from now on.

        Raises:
            ValueError: If the saved critics have another hidden size.
        """
        replay = Transitions(*state["replay"])
        critics = cls(settings, replay)
        saved = len(state["heads"]["v_heads.0.0.bias"])
        if saved != settings.hidden_size:
            raise InputError(f"hidden_size: expected {saved} as in the saved critics, got {settings.hidden_size}")
        critics.center, critics.scale, critics.replay = state["center"], state["scale"], replay
        for name in ("heads", "targets", "optimizer"):
            getattr(critics, name).load_state_dict(state[name])
        for group in critics.optimizer.param_groups:
            group["lr"] = settings.learning_rate
        return critics
