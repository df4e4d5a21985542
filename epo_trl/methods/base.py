"""What a method of training can do: take part when a batch is collected, or when its loss is computed.

Two facts keep this small. Every policy loss of TRL is proportional to the advantage, which may differ from token to
token, so a weight on a token's loss is a weight on its advantage: most methods are a map from advantages to advantages
(`shape`). And statistics of a batch belong to its collection, over all episodes and ranks, not to micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from epo_trl.methods.turn_features import TurnFeatures
from epo_trl.objectives import turn_mean_weights
from epo_trl.types import Episode


class Need(StrEnum):
    """What has to be there before a method can work."""

    GROUPS = "groups"  # several episodes of each task
    SCORES = "scores"  # log-probs and entropies of the policy that played: a pass without gradient, unless TRL makes it
    VALUES = "values"  # a critic
    NUCLEUS = "nucleus"  # tokens to which the policy at the start of RL gives more than the method's `cut`
    FEATURES = "features"  # what the policy at the start of RL makes of each turn, as vectors
    TURN_REWARDS = "turn_rewards"  # the rewards of single turns, which no reward function of TRL's sees or changes
    TOP_P = "top_p"  # the policy's own nucleus: the fewest tokens that together have the method's `top_p`


@dataclass(frozen=True, slots=True)
class Ranks:
    """What a method can ask the other processes for. Both calls are collective: every rank makes them.

    Args:
        sum: Sums a tensor over all ranks.
        gather: Joins lists of plain Python objects, in the order of the ranks.
        index: Of this process.
        count: Number of processes.
    """

    sum: Callable[[Tensor], Tensor] = lambda tensor: tensor
    gather: Callable[[list[Any]], list[Any]] = lambda objects: objects
    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Batch:
    """What was collected for one RL step: this rank's B episodes, with T completion tokens and at most K turns.

    Args:
        episodes: B of them. Those without `is_usable` carry no signal.
        group_ids: (B,) integers; episodes of one task have one number, on other ranks too.
        turn_rewards: (B, K), 0 beyond an episode's last turn and for episodes without a signal.
        group_advantages: (B,) TRL's: the episode's total reward against its group's, 0 without a signal.
        turn_ids: (B, T) turn of each token, -1 on padding.
        mask: (B, T), 1 on the sampled tokens that the loss counts.
        ranks: The other processes.
        rl_step: From 0.
        total_rl_steps: Of the run.
        logps: (B, T) log-probability of each token under the policy that played, in nats, with `Need.SCORES`.
        entropy: (B, T) entropy of its distribution, in nats, with `Need.SCORES`.
        top_p_entropy: (B, T) the same over its own nucleus, with `Need.SCORES` and `Need.TOP_P`.
        values: (B, T) the critic's value before each token, in units of reward, with `Need.VALUES`.
        final_values: (B,) its value of the state after the last turn, 0 where the episode terminated.
        features: Of the turns, with `Need.FEATURES`.
    """

    episodes: Sequence[Episode]
    group_ids: Tensor
    turn_rewards: Tensor
    group_advantages: Tensor
    turn_ids: Tensor
    mask: Tensor
    ranks: Ranks = Ranks()
    rl_step: int = 0
    total_rl_steps: int = 1
    logps: Tensor | None = None
    entropy: Tensor | None = None
    top_p_entropy: Tensor | None = None
    values: Tensor | None = None
    final_values: Tensor | None = None
    features: TurnFeatures | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task, on whichever ranks they were played.

    Args:
        returns: Total reward of each episode.
        won: Whether each solved the task.
        usable: Whether each carries a signal.
    """

    returns: tuple[float, ...]
    won: tuple[bool, ...]
    usable: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Credit:
    """Who gets how much of the outcome.

    Args:
        advantages: (B, T), 0 where no token was sampled.
        returns: (B, T) targets of the critic; `None` without one.
        points: (B, T) boolean, where the critic is trained; `None` without one.
        outcomes: (B, K) discounted rewards from each turn on, NaN for a turn without a decision: if no two episodes
            differ in them, the trainer sets the advantages to 0. `None` leaves the advantages as they are.
    """

    advantages: Tensor
    returns: Tensor | None = None
    points: Tensor | None = None
    outcomes: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Shaped:
    """Advantages after a method has changed them.

    Args:
        advantages: (B, T).
        marks: (B, T) tensors by name, which `loss` finds in its micro-batches.
        metrics: What to log of this batch, by full name, equal on all ranks.
    """

    advantages: Tensor
    marks: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass of the policy gave: b rows of T completion tokens.

    Args:
        logps: (b, T) in nats, with gradient.
        entropy: (b, T) in nats, with gradient.
        old_logps: (b, T) under the policy that played; equal to `logps` as long as there was no update in between.
        advantages: (b, T).
        turn_ids: (b, T), -1 on padding.
        mask: (b, T), 1 on the sampled tokens that the loss counts.
        num_episodes: Episodes with a token in the loss in the whole batch, all ranks together.
        policy_mean: Sums (b, T) values of tokens with the weights that the policy loss gives to tokens. A term of
            `loss` made of it counts like the policy loss, `policy_mean(x)` as much as advantages of `-x`.
        rl_step: From 0.
        total_rl_steps: Of the run.
        nucleus_entropy: (b, T) in nats, with gradient: entropy of the policy over the tokens to which the policy at the
            start of RL gives more than `cut`, renormalised; 0 where those are less than two. With `Need.NUCLEUS`.
        choice: (b, T) boolean, where they are two or more, with `Need.NUCLEUS`.
        top_p_entropy: (b, T) the same over the fewest tokens that have `top_p` of the policy now, with `Need.TOP_P`.
        compute_dtype: What the logits were computed in: two passes of one policy differ by its rounding.
        marks: What the method's `shape` has attached to these rows.
    """

    logps: Tensor
    entropy: Tensor
    old_logps: Tensor
    advantages: Tensor
    turn_ids: Tensor
    mask: Tensor
    num_episodes: Tensor
    policy_mean: Callable[[Tensor], Tensor]
    rl_step: int = 0
    total_rl_steps: int = 1
    nucleus_entropy: Tensor | None = None
    choice: Tensor | None = None
    top_p_entropy: Tensor | None = None
    compute_dtype: torch.dtype = torch.float32
    marks: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def _turn_weights(self) -> Tensor:
        count = self.num_episodes.clamp(min=1)
        return turn_mean_weights(self.turn_ids, self.mask, num_trajectories=count, dtype=self.entropy.dtype)

    def turn_mean(self, values: Tensor) -> Tensor:
        """Returns what these rows add to the batch's mean over episodes, their turns and their tokens (EPO, Eq. 4).

        Args:
            values: (b, T).
        """
        return (self._turn_weights * values).sum()


@dataclass(frozen=True, slots=True)
class StepSummary:
    """What is known at the end of an RL step, equal on all ranks.

    Args:
        entropy: Token-level mean entropy of the policy that played, in nats; `nan` if no token counted.
        turn_entropy: The same for each turn index that has tokens.
        ranks: The other processes.
        rl_step: The one that ends, from 0.
        total_rl_steps: Of the run.
    """

    entropy: float
    turn_entropy: Mapping[int, float]
    ranks: Ranks = Ranks()
    rl_step: int = 0
    total_rl_steps: int = 1


class Method:
    """One idea of how a policy learns from episodes. A subclass is a dataclass whose fields are its settings.

    Each hook does nothing unless it is overridden. The configuration names the methods. A run has one with `credit`, at
    most one with `ratio`, and any number with the other hooks, called in the order of the configuration.

    Attributes:
        needs: What has to be there.
        config_fields: Settings that are fields of the trainer's configuration, with the same names.
        cut: With `Need.NUCLEUS`: the probability above which a token belongs to it. One for all methods of a run.
        top_p: With `Need.TOP_P`: the probability that the policy's own nucleus holds. One for all methods of a run.
    """

    needs: ClassVar[frozenset[Need]] = frozenset()
    config_fields: ClassVar[tuple[str, ...]] = ()
    cut: float
    top_p: float

    def described(self) -> str:
        """Returns what a model card says was used, in Markdown; `""` to leave it out."""
        return type(self).__name__

    def check(self, args: Any) -> None:
        """Raises `ValueError`, with the reason, if this makes no sense with the rest of the configuration."""

    # --- When a batch is collected -------------------------------------------------------------------------------

    def turn_rewards(self, episode: Episode) -> Sequence[float] | None:
        """Returns a reward for each turn in place of the rollout's, or `None` to leave them."""
        return None

    def keep(self, group: Group) -> bool:
        """Returns whether a group is trained on. Another task is played in place of one that is not."""
        return True

    def credit(self, batch: Batch) -> Credit:
        """Returns who gets how much of the outcome."""
        raise NotImplementedError

    def shape(self, advantages: Tensor, batch: Batch) -> Shaped:
        """Returns the advantages as this method wants them.

        Args:
            advantages: (B, T) by the credit, whitened if the trainer does that, and by the methods before.
            batch: What was collected.
        """
        return Shaped(advantages)

    # --- In the loss ---------------------------------------------------------------------------------------------

    def ratio(self, logps: Tensor, old_logps: Tensor, turn_ids: Tensor, mask: Tensor) -> Tensor:
        """Returns (b, T) log-probabilities whose difference from `old_logps` is the log of the ratio in the loss."""
        return logps

    def loss(self, micro: MicroBatch) -> Tensor | None:
        """Returns a term beside the policy loss, or `None`: what these rows add to a mean over the whole batch."""
        return None

    # --- What is watched and kept ---------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, micro: MicroBatch) -> None:
        """Takes statistics. Each token of a batch comes by once, scored by the policy that played."""

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        """Returns the metrics of the RL step, and makes ready for the next. Collective."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, equal on all ranks, as plain JSON types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state_dict` has returned."""

    def learned_state(self) -> dict[str, Any]:
        """Returns what else a resumed run needs, equal on all ranks: tensors, in dicts and lists of plain types."""
        return {}

    def load_learned_state(self, state: Mapping[str, Any]) -> None:
        """Takes up what `learned_state` has returned."""

    def batch_state(self) -> dict[str, Tensor]:
        """Returns what this rank needs to go on inside of an RL step."""
        return {}

    def load_batch_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes up what `batch_state` has returned."""
