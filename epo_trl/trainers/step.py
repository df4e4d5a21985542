"""One RL step: a batch of episodes, on its way to the loss. `EPOTrainer` calls this class from top to bottom.

    step = RLStep.lay_out(episodes, ...)         # a row of TRL's batch for each episode; its turns are segments
    step.to_rollout_output()                     # inside TRL, its `rollout_func`: the rows, as if it had made them
    rewards = step.compare(rewards)              # inside TRL, when it has rewards: which of them count
    batch = step.batch(inputs, methods, ...)     # what the methods assign advantages to, scored as they need it
    advantages = methods.credit(batch).advantages
    advantages = step.modify(methods, advantages, batch)
    part = step.part(inputs, args, passes)       # for each micro-batch: what its loss reads

TRL's batch is a dict of tensors, which TRL shuffles and splits into micro-batches. It has one tensor of ours, `row`:
the index of each row in the RL step, where all else stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import pad

from epo_trl.devices import to_device
from epo_trl.methods import Batch, Comm, Methods, Need, TokenScores
from epo_trl.methods.stack import Annotations
from epo_trl.rollout import ContextBuilder, episode_to_row
from epo_trl.rollout.rows import Row
from epo_trl.scoring.row_scorer import RowScorer
from epo_trl.scoring.turn_layout import TurnLayout
from epo_trl.trainers.config import EPOConfig
from epo_trl.types import Episode

Inputs = Mapping[str, Tensor]  # TRL's batch, or a part of it
_ROW_MEANS = ("grpo", "sapo", "dr_grpo", "luspo")  # TRL's losses that are means over rows


@dataclass(slots=True)
class RLStep:
    """The batch that this rank has collected for an RL step: B episodes, a row each.

    Args:
        episodes: The episodes, with the rewards assigned by the methods; `[]` if resumed within the RL step.
        rows: TRL's row of each episode; `[]` if resumed.
        layout: Turns of the rows.
        group_size: Number of episodes per task. The episodes of a group are adjacent in the list over all ranks.
        ranks: Communication with the other processes.

    Attributes:
        equal: (B,) boolean, true where the rewards of a row's group do not differ.
        num_episodes: Number of episodes with a token in the loss, over all ranks.
        scored: Scores of the rows in each call by TRL while the batch is collected.
        scores: Scores under the behaviour policy, if a method or a later update needs them.
        targets: What the critic is trained on.
        value_sums: Sums over the micro-batches: the value loss, the number of clipped values, that of decision points.
        annotations: (B, T) tensors of the rows, by method and name.
        micro_batches_done: Number of micro-batches whose loss was computed.
    """

    episodes: list[Episode]
    rows: Sequence[Row]
    layout: TurnLayout
    group_size: int
    ranks: Comm
    equal: Tensor | None = None
    num_episodes: Tensor | None = None
    scored: list[TokenScores] = field(default_factory=list)
    scores: TokenScores | None = None
    targets: ValueTargets | None = None
    value_sums: Tensor | None = None
    annotations: Annotations = field(default_factory=dict)
    micro_batches_done: int = 0

    # --- When a batch is collected -------------------------------------------------------------------------------

    @classmethod
    def lay_out(
        cls,
        episodes: list[Episode],
        context: ContextBuilder,
        group_size: int,
        ranks: Comm,
        *,
        placeholder_id: int,
        multiple: int | None,
    ) -> RLStep:
        """Lays out episodes as rows, padded as TRL pads its completions: to a multiple of `multiple`.

        `placeholder_id` is any valid token id, for episodes without a learning signal.
        """
        rows = [episode_to_row(episode, placeholder_id) for episode in episodes]
        layout = TurnLayout(
            _padded([row.turn_ids for row in rows], -1, multiple),
            _padded([row.env_mask for row in rows], 0, multiple),
            torch.tensor([len(row.prompt_ids) for row in rows]),
            windowed=context.is_windowed,
        )
        return cls(episodes, rows, layout, group_size, ranks)

    def to_rollout_output(self) -> dict[str, Any]:
        """Returns the batch in the format of TRL's `rollout_func`. Extra fields reach the reward functions, row by row.

        Collective: if any rank has log-probabilities, a rank whose episodes were all aborted returns them too.
        """
        rows = self.rows
        has_logprobs = any(self.ranks.gather([any(row.logprobs is not None for row in rows)]))
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.completion_ids for row in rows],
            "env_mask": [row.env_mask for row in rows],
            "logprobs": [row.logprobs or [0.0] * len(row.completion_ids) for row in rows] if has_logprobs else None,
            "episode_return": [episode.total_reward for episode in self.episodes],
            "episode": self.episodes,
        }

    def compare(self, rewards: Tensor, weights: Tensor, aggregation: str) -> Tensor:
        """Returns (N, F) rewards of all ranks, NaN for episodes without a signal, which TRL's baselines leave out.

        Also finds the rows whose advantage must be 0: TRL's is then the rounding error of a mean, divided by 1e-4.
        Collective.
        """
        usable = torch.tensor(self.ranks.gather([episode.is_usable for episode in self.episodes]))
        rewards = rewards.masked_fill(~usable.to(rewards.device).unsqueeze(1), torch.nan)
        compared = compared_rewards(rewards, weights.to(rewards.device), aggregation)
        equal = equal_within_groups(compared, self.group_size).repeat_interleave(self.group_size)
        self.equal = equal[self._first : self._first + len(self.episodes)]
        return rewards

    @torch.no_grad()
    def batch(
        self,
        inputs: Inputs,
        methods: Methods,
        scorer: RowScorer,
        policy: Any,
        reference_policy: Callable[[], AbstractContextManager[Any]],
        rl_step: int,
        total_rl_steps: int,
    ) -> Batch:
        """Returns what the methods assign advantages to: scores the rows as the methods need it. Collective.

        `reference_policy` returns a context manager of the reference model.
        """
        # Rows without a token in the loss (aborted, or masked by `mask_truncated_completions`) do not count.
        self.num_episodes = self.ranks.sum(response_mask(inputs).any(1).sum().float())
        ids, reference, features = row_ids(inputs), {}, None
        if "old_per_token_logps" in inputs:  # TRL scores the policy before the reference model
            self.scores = self.scored[0]
        elif methods.need(Need.SCORES):
            self.scores = scorer.score(policy, ids, self.layout)[0]
        if methods.head_statistics("reference_statistics"):
            with reference_policy() as model:
                reference = scorer.reference(model, ids, self.layout)
        if methods.need(Need.FEATURES):
            with reference_policy() as model:
                features = scorer.features(model, ids, self.layout)
        device, count = inputs["advantages"].device, len(self.episodes)
        assert self.equal is not None
        return Batch(
            episodes=self.episodes,
            group_ids=torch.arange(self._first, self._first + count, device=device) // self.group_size,
            turn_rewards=to_device(self.turn_rewards, device),
            group_advantages=inputs["advantages"].masked_fill(self.equal, 0.0),
            turn_ids=to_device(self.layout.turn_ids, device),
            mask=response_mask(inputs),
            ranks=self.ranks,
            rl_step=rl_step,
            total_rl_steps=total_rl_steps,
            scores=self.scores,
            turn_features=features,
            reference=reference,
        )

    @property
    def turn_rewards(self) -> Tensor:
        """(B, K) rewards of the turns, 0 beyond an episode's last turn and for episodes without a learning signal."""
        rewards = [[turn.reward for turn in episode.turns] * episode.is_usable for episode in self.episodes]
        width = max(1, *map(len, rewards))
        return torch.tensor([row + [0.0] * (width - len(row)) for row in rewards])

    def modify(self, methods: Methods, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the (B, T) advantages as the methods modify them, and keeps the annotations of the rows."""
        advantages, self.annotations = methods.modify_advantages(advantages, batch)
        self.scored = []
        return advantages

    @property
    def _first(self) -> int:
        """Index of this rank's first episode in the list over all ranks."""
        return self.ranks.index * len(self.episodes)

    # --- In the loss ---------------------------------------------------------------------------------------------

    def part(self, inputs: Inputs, args: EPOConfig, passes: int) -> Part:
        """Returns the rows of a micro-batch of TRL's, one of so many `passes` of an optimizer step."""
        assert self.num_episodes is not None
        rows, device = inputs["row"].cpu(), inputs["advantages"].device  # a resumed batch is on the device as a whole
        layout, on_device = self.layout.rows(rows), to_device(rows, device)

        def at(values: Any) -> Any:
            return _map(lambda tensor: tensor[on_device] if tensor.dim() else tensor, values)

        return Part(
            inputs=inputs,
            args=args,
            passes=passes,
            processes=self.ranks.count,
            num_episodes=self.num_episodes,
            rows=rows.tolist(),
            layout=layout,
            turn_ids=to_device(layout.turn_ids, device),
            behaviour=at(self.scores) if "old_per_token_logps" in inputs else None,
            targets=at(self.targets),
            annotations=at(self.annotations),
        )

    # --- Checkpoints within an RL step ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns what the loss reads, as tensors in dicts. TRL's batch is saved beside it."""
        names = ("layout", "num_episodes", "scores", "targets", "value_sums", "annotations", "micro_batches_done")
        return {name: _plain(getattr(self, name)) for name in names}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], group_size: int, ranks: Comm) -> RLStep:
        """Returns the RL step of a checkpoint."""
        layout = _map(Tensor.cpu, TurnLayout(**state["layout"]))
        scores = None if state["scores"] is None else TokenScores(**state["scores"])
        targets = None if state["targets"] is None else ValueTargets(**state["targets"])
        return cls(
            [],
            [],
            group_size=group_size,
            ranks=ranks,
            **{**state, "layout": layout, "scores": scores, "targets": targets},
        )


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """What a critic is trained on.

    Args:
        values: (B, T) values when the batch was collected.
        returns: (B, T) targets.
        points: (B, T) boolean, the tokens on which it is trained.
        count: Number of these tokens, over all ranks.
        weights: (B, T) weights of the squared errors; `None` for all 1.
    """

    values: Tensor
    returns: Tensor
    points: Tensor
    count: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a micro-batch, with all that their loss reads. Fields are those of `RLStep`, of b rows.

    Args:
        inputs: TRL's tensors of the rows.
        args: Configuration of the trainer.
        passes: Number of micro-batches of this optimizer step.
        processes: Number of processes, over which gradients are averaged.
        num_episodes: Of the whole batch.
        rows: Indices of the rows in the RL step.
        layout: Turns of the rows.
        turn_ids: (b, T) turn of each token, -1 on padding, on the device.
        behaviour: Scores under the behaviour policy if TRL reads them too, since weights are updated within the batch.
        targets: Targets of a critic.
        annotations: (b, T) tensors.
    """

    inputs: Inputs
    args: EPOConfig
    passes: int
    processes: int
    num_episodes: Tensor
    rows: Sequence[int]
    layout: TurnLayout
    turn_ids: Tensor
    behaviour: TokenScores | None
    targets: ValueTargets | None
    annotations: Annotations

    @property
    def input_ids(self) -> Tensor:
        """(b, P + T) token ids of prompt and completion."""
        return row_ids(self.inputs)

    @property
    def mask(self) -> Tensor:
        """(b, T), 1 on the sampled tokens that count in the loss."""
        return response_mask(self.inputs)

    def old_logps(self, logps: Tensor) -> Tensor:
        """Returns the (b, T) log-probabilities with which TRL compares these."""
        old = self.inputs.get("old_per_token_logps")
        return logps.detach() if old is None else old

    @property
    def update_factor(self) -> float:
        """Factor on a part of a mean over the collected batch, of which an optimizer step uses a part."""
        return self.args.steps_per_generation / self.passes * self.processes

    @property
    def row_factor(self) -> Tensor | float:
        """Factor that makes TRL's mean over rows a mean over the episodes with a token in the loss.

        It is the number of rows in the batches of all ranks, divided by that of those episodes; 1 for other losses.
        """
        if self.args.loss_type not in _ROW_MEANS:
            return 1.0
        return len(self.rows) * self.args.steps_per_generation * self.processes / self.num_episodes.clamp(min=1)

    @property
    def token_weights(self) -> Tensor:
        """(b, T) weights of the tokens in the policy loss.

        If all ratios are 1, `-(weights * advantages).sum()` has the value of the loss, for the losses with a ratio.
        """
        mask, kind, passes = self.mask, self.args.loss_type, self.passes
        if kind in ("cispo", "dapo", "vespo"):  # over the tokens of the whole batch, of which an update uses a part
            tokens = self.inputs["num_items_in_batch"].clamp(min=1.0) / self.processes
            weights = mask / (tokens * passes / self.args.steps_per_generation)
        elif kind in ("grpo", "sapo"):
            weights = mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / len(mask) / passes
        elif kind == "bnpo":
            weights = mask / mask.sum().clamp(min=1.0) / passes
        elif kind == "dr_grpo":
            weights = mask / (len(mask) * self.args.max_completion_length) / passes
        else:  # luspo
            weights = mask / len(mask) / passes
        if "importance_sampling_ratio" in self.inputs and kind != "vespo":  # corrects vLLM's log-probabilities
            weights = weights * self.inputs["importance_sampling_ratio"]
        return weights * self.row_factor


def compared_rewards(rewards: Tensor, weights: Tensor, aggregation: str) -> Tensor:
    """Returns what TRL compares in a group: (N, 1) weighted sums, or (N, F) rewards, before it normalizes them.

    `rewards` are (N, F) of N episodes by F reward functions, NaN where there is none; a sum takes that as 0. A function
    of weight 0 is not compared. `aggregation` is TRL's `multi_objective_aggregation`.
    """
    if aggregation == "normalize_then_sum":
        return rewards[:, weights != 0]
    sums = (rewards * weights).nansum(1, keepdim=True)
    return sums.masked_fill(rewards.isnan().all(1, keepdim=True), torch.nan)


def equal_within_groups(rewards: Tensor, group: int) -> Tensor:
    """Returns (G,) booleans: whether all (N, F) rewards within a group are equal up to rounding.

    A reward may be NaN. The members of a group, so many as `group`, are adjacent.
    """
    groups = rewards.view(-1, group, rewards.shape[1])
    low, high = groups.nan_to_num(torch.inf).amin(1), groups.nan_to_num(-torch.inf).amax(1)
    # With a tolerance: rewards that are sums over turns have rounding errors.
    return (high - low <= 1e-6 * high.abs().clamp(min=1)).all(1)


def row_ids(inputs: Inputs) -> Tensor:
    """Returns the (B, P + T) token ids of prompt and completion."""
    return torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)


def response_mask(inputs: Inputs) -> Tensor:
    """Returns the (B, T) mask, 1 on the sampled tokens that count in the loss."""
    return inputs["completion_mask"] * inputs["tool_mask"]


def _padded(lists: Sequence[list[int]], value: int, multiple: int | None) -> Tensor:
    tensors = [torch.tensor(row) for row in lists]
    return pad(tensors, padding_value=value, padding_side="right", pad_to_multiple_of=multiple)


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Applies a function to each tensor in mappings and dataclasses."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _map(function, each) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _map(function, getattr(value, one.name)) for one in fields(value)})
    return value


def _plain(value: Any) -> Any:
    """Returns a mapping or a dataclass as a dict with plain keys, which `torch.load` reads without code."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    return value
