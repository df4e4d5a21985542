"""Base class of training methods: hooks at batch collection and in the loss, and the data passed to them.

Every policy loss in TRL is proportional to the advantage, and advantages may differ per token. Weighting a token's loss
is the same as weighting its advantage, so most methods map advantages to advantages (`modify_advantages`). Statistics
are computed once at collection, over all episodes and ranks, and never per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from epo_trl.bounds import check_bounds
from epo_trl.errors import InputError
from epo_trl.methods.lm_head import LMHead
from epo_trl.objectives import turn_mean_weights
from epo_trl.types import Episode

T = TypeVar("T")
# Maps the LM head at m sampled tokens, and the method's token annotations there, (m, ...) by name, to (m, ...) values.
# A batch has no annotations when it is collected.
Statistic = Callable[[LMHead, Mapping[str, Tensor]], Tensor]


class Need(StrEnum):
    """Inputs that a method requires."""

    GROUPS = "groups"  # several episodes per task
    SCORES = "scores"  # log-probs and entropies under the behaviour policy: a no-grad pass, unless TRL already makes it
    VALUES = "values"  # a critic
    FEATURES = "features"  # hidden states of each turn under the reference policy
    TURN_REWARDS = "turn_rewards"  # per-turn rewards, which TRL's reward functions neither see nor change


@dataclass(frozen=True, slots=True)
class Comm:
    """Communication between processes. `sum` and `gather` are collective: every rank must call them.

    Args:
        sum: Sums a tensor over all ranks.
        gather: Joins lists of plain Python objects, in the order of the ranks.
        index: Rank of this process.
        count: Number of processes.
    """

    sum: Callable[[Tensor], Tensor] = lambda tensor: tensor
    gather: Callable[[list[Any]], list[Any]] = lambda objects: objects
    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of the (B, T) tokens of a batch under one policy, 0 where no token was sampled.

    Args:
        logps: (B, T) log-probabilities in nats.
        entropy: (B, T) entropies in nats; NaN under the reference policy.
        statistics: (B, T, ...) statistics of the LM head that methods declare, by method and name.
        values: (B, T) values of the critic in units of reward; `None` if they were not requested.
    """

    logps: Tensor
    entropy: Tensor
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    values: Tensor | None = None


@dataclass(frozen=True, slots=True)
class CriticValues:
    """Values of the critic on a batch, in units of reward.

    Args:
        values: (B, T) value of the state before each token.
        final_values: (B,) value of the state after the last turn, 0 where the episode terminated.
    """

    values: Tensor
    final_values: Tensor


@dataclass(frozen=True, slots=True)
class TurnFeatures:
    """Last hidden states of the reference policy, in float32, 0 where there is no turn.

    Args:
        states: (B, K, D) state of a turn: the hidden state at the last token before its response.
        actions: (B, K, D) action of a turn: the mean hidden state over the tokens of its response.
        turn_mask: (B, K) boolean, true for the turns of usable episodes.
    """

    states: Tensor
    actions: Tensor
    turn_mask: Tensor


def required(given: T | None, need: Need) -> T:
    """Returns an input of a batch. Raises `InputError` if it is absent, because no method declares the need."""
    if given is None:
        raise InputError(f"needs: expected Need.{need.name} among those of a method that reads this, got none")
    return given


@dataclass(frozen=True, slots=True)
class Batch:
    """Episodes collected for one RL step: this rank's B episodes, with T completion tokens and at most K turns.

    Args:
        episodes: B episodes. Those without `is_usable` carry no signal.
        group_ids: (B,) integers; episodes of the same task share an id across ranks.
        turn_rewards: (B, K) reward of each turn; 0 beyond an episode's last turn and for episodes without a signal.
        group_advantages: (B,) TRL's advantages: the episode's total reward relative to its group, 0 without a signal.
        turn_ids: (B, T) turn of each token, -1 on padding.
        mask: (B, T), 1 on the sampled tokens that count in the loss.
        ranks: Communication with the other processes.
        rl_step: Index of the RL step, from 0.
        total_rl_steps: Number of RL steps in the run.
        scores: Scores under the behaviour policy. Requires `Need.SCORES`.
        critic: Values of the critic. Requires `Need.VALUES`.
        turn_features: Hidden states of the turns. Requires `Need.FEATURES`.
        reference: (B, T, ...) values of the method's `reference_statistics`, by name.

    The properties return the optional fields and raise `InputError` if no method declares the need.
    """

    episodes: Sequence[Episode]
    group_ids: Tensor
    turn_rewards: Tensor
    group_advantages: Tensor
    turn_ids: Tensor
    mask: Tensor
    ranks: Comm = Comm()
    rl_step: int = 0
    total_rl_steps: int = 1
    scores: TokenScores | None = None
    critic: CriticValues | None = None
    turn_features: TurnFeatures | None = None
    reference: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def logps(self) -> Tensor:
        """(B, T) log-probability of each token under the behaviour policy, in nats."""
        return required(self.scores, Need.SCORES).logps

    @property
    def entropy(self) -> Tensor:
        """(B, T) entropy of the behaviour policy at each token, in nats."""
        return required(self.scores, Need.SCORES).entropy

    @property
    def statistics(self) -> Mapping[str, Tensor]:
        """(B, T, ...) values of the method's `statistics` under the behaviour policy, by name."""
        return required(self.scores, Need.SCORES).statistics

    @property
    def values(self) -> Tensor:
        """(B, T) the critic's value before each token."""
        return required(self.critic, Need.VALUES).values

    @property
    def final_values(self) -> Tensor:
        """(B,) the critic's value of the state after the last turn, 0 where the episode terminated."""
        return required(self.critic, Need.VALUES).final_values

    @property
    def features(self) -> TurnFeatures:
        """Hidden states of the turns under the reference policy."""
        return required(self.turn_features, Need.FEATURES)


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task, collected on any rank.

    Args:
        returns: Total reward of each episode.
        won: Whether each episode solved the task.
        usable: Whether each episode carries a signal.
    """

    returns: tuple[float, ...]
    won: tuple[bool, ...]
    usable: tuple[bool, ...]


class Selection(StrEnum):
    """What happens to a group of a collected batch."""

    TRAIN = "train"
    REPLACE = "replace"  # by another task's, in at most `max_resamples` rounds; then it is trained on
    LEAVE_OUT = "leave out"  # of every term and every mean; it is not replaced


@dataclass(frozen=True, slots=True)
class Credit:
    """Advantages assigned to the tokens of a batch, and what the critic is trained on.

    Args:
        advantages: (B, T), 0 where no token was sampled.
        returns: (B, T) targets of the critic; `None` without a critic.
        value_mask: (B, T) boolean, the tokens on which the critic is trained; `None` without a critic.
        outcomes: (B, K) discounted reward-to-go of each turn, NaN for a turn without a decision. If they are equal in
            all episodes, the trainer sets the advantages to 0. `None` leaves the advantages unchanged.
        value_weights: (B, T) weights of the critic's squared errors, 1 on average over all ranks; `None` for all 1.
    """

    advantages: Tensor
    returns: Tensor | None = None
    value_mask: Tensor | None = None
    outcomes: Tensor | None = None
    value_weights: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModifiedAdvantages:
    """Advantages modified by a method.

    Args:
        advantages: (B, T) modified advantages.
        token_annotations: (B, T, ...) tensors by name, passed on to `loss` and `loss_statistics`.
        metrics: Metrics of this batch by full name, equal on all ranks.
    """

    advantages: Tensor
    token_annotations: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MicroBatch:
    """Outputs of one forward pass of the policy: b rows of T completion tokens.

    Args:
        logps: (b, T) log-probabilities in nats, with gradient.
        entropy: (b, T) entropies in nats, with gradient.
        old_logps: (b, T) under the behaviour policy; equal to `logps` until the first update on the batch.
        advantages: (b, T) advantages after all methods.
        turn_ids: (b, T) turn of each token, -1 on padding.
        mask: (b, T), 1 on the sampled tokens that count in the loss.
        num_episodes: Number of episodes in the whole batch with a token in the loss, over all ranks.
        policy_mean: Sums (b, T) token values with the token weights of the policy loss. A `loss` term built from it has
            the scale of the policy loss: `policy_mean(x)` counts as much as advantages of `-x`.
        rl_step: Index of the RL step, from 0.
        total_rl_steps: Number of RL steps in the run.
        statistics: (b, T, ...) values of the method's `loss_statistics`, by name, with gradient.
        compute_dtype: Dtype of the logits. Its rounding makes two passes of the same policy differ.
        token_annotations: Tensors that the method's `modify_advantages` attached to these rows.
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
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    compute_dtype: torch.dtype = torch.float32
    token_annotations: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def _turn_weights(self) -> Tensor:
        count = self.num_episodes.clamp(min=1)
        return turn_mean_weights(self.turn_ids, self.mask, num_trajectories=count, dtype=self.entropy.dtype)

    def turn_mean(self, values: Tensor) -> Tensor:
        """Returns the part of (b, T) values in the batch's mean over episodes, turns and tokens (EPO, Eq. 4)."""
        return (self._turn_weights * values).sum()


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Summary of a finished RL step, equal on all ranks.

    Args:
        entropy: Token-level mean entropy of the behaviour policy, in nats; `nan` if no token counted.
        turn_entropy: Mean entropy of each turn index that has tokens, in nats.
        ranks: Communication with the other processes.
        rl_step: Index of the finished RL step, from 0.
        total_rl_steps: Number of RL steps in the run.
    """

    entropy: float
    turn_entropy: Mapping[int, float]
    ranks: Comm = Comm()
    rl_step: int = 0
    total_rl_steps: int = 1


class Tally:
    """Named sums of an RL step, over all its micro-batches and ranks. A checkpoint holds that of a method's `tally`."""

    def __init__(self, *names: str):
        self._names = names
        self.sums = torch.zeros(len(names), dtype=torch.float64)

    def add(self, **values: float | Tensor) -> None:
        """Adds a number or a one-element tensor to each of the sums, on the device of the first tensor."""
        device = next((value.device for value in values.values() if isinstance(value, Tensor)), None)
        added = torch.stack([torch.as_tensor(values[name], dtype=torch.float64, device=device) for name in self._names])
        self.sums = self.sums.to(added.device) + added.detach()

    def take(self, ranks: Comm) -> dict[str, float]:
        """Returns the sums over all ranks by name, and resets them. Collective."""
        sums = ranks.sum(self.sums).tolist()
        self.sums = torch.zeros_like(self.sums)
        return dict(zip(self._names, sums, strict=True))


class Method:
    """Base class of training methods. A subclass is a dataclass whose fields are its settings.

    Hooks do nothing by default. Of the methods of a run exactly one overrides `credit`, at most one `ratio`, and any
    number the other hooks. They are called in the order of the configuration.

    Attributes:
        needs: Inputs that the method requires.
        config_fields: Settings that are fields of the trainer's configuration, under the same names.
        tally: Sums of the RL step, for `end_rl_step`; set in `__post_init__`.
        token_weight: Above 0, with `Need.VALUES`, if tokens but the first of a turn have values of a second head.
        card: Text of the model card, in Markdown, with settings in braces; `""` for no text.
        statistics: Statistics of the policy's LM head when a batch is collected, with `Need.SCORES`, by name.
        loss_statistics: The same in the loss, with gradient.
        reference_statistics: The same of the reference policy, at collection. Integers are token ids, padded with -1.
    """

    needs: ClassVar[Set[Need]] = frozenset()
    config_fields: ClassVar[tuple[str, ...]] = ()
    tally: Tally = Tally()
    token_weight: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def card(self) -> str:
        """The name of the class."""
        return type(self).__name__

    @property
    def statistics(self) -> Mapping[str, Statistic]:
        """No statistics."""
        return {}

    loss_statistics = reference_statistics = statistics

    def check(self, args: Any) -> None:
        """Raises `ValueError`, with the reason, if the rest of the configuration is incompatible with the method."""

    # --- When a batch is collected -------------------------------------------------------------------------------

    def turn_rewards(self, episode: Episode) -> Sequence[float] | None:
        """Returns a reward for each turn that replaces the rollout's rewards, or `None` to keep those."""
        return None

    def select(self, groups: Sequence[Group]) -> Sequence[Selection]:
        """Returns what happens to each group, of all ranks. Called again when groups have been replaced."""
        return [Selection.TRAIN] * len(groups)

    def credit(self, batch: Batch) -> Credit:
        """Assigns advantages to the tokens of the batch."""
        raise NotImplementedError

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> ModifiedAdvantages:
        """Returns modified (B, T) advantages: of the credit, whitened if the trainer does so, and earlier methods."""
        return ModifiedAdvantages(advantages)

    # --- In the loss ---------------------------------------------------------------------------------------------

    def ratio(self, logps: Tensor, old_logps: Tensor, turn_ids: Tensor, mask: Tensor) -> Tensor:
        """Returns (b, T) log-probabilities; their difference from `old_logps` is the log-ratio used in the loss."""
        return logps

    def loss(self, micro: MicroBatch) -> Tensor | None:
        """Returns an additional loss term, or `None`: the contribution of these rows to a mean over the whole batch."""
        return None

    # --- Metrics and state ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, micro: MicroBatch) -> None:
        """Collects statistics. Called once for each token, scored by the behaviour policy, without annotations."""

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        """Returns the metrics of the RL step and resets for the next one. Collective."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs, equal on all ranks: tensors and plain types in dicts and lists.

        A checkpoint holds the tally itself, for each rank.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state returned by `state_dict`."""
