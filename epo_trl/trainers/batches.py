"""The batch of an RL step: its episodes, TRL's rows of them, and what the methods see of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import pad

from epo_trl.devices import to_device
from epo_trl.methods import Batch, Comm, Methods, MicroBatch, Need, TokenScores
from epo_trl.rollout import ContextBuilder, episode_to_row
from epo_trl.rollout.rows import Row
from epo_trl.scoring.reference import extract_features
from epo_trl.scoring.turn_layout import TurnLayout
from epo_trl.types import Episode

Inputs = dict[str, Any]
_LAYOUT = "layout/{name}"  # key in TRL's batch, which shuffles and splits CPU tensors like device tensors
_ENTROPY, _STATISTIC = "behaviour/entropy", "behaviour/{need}"  # keys of scores under the behaviour policy
_ON_CPU = ("turn_ids", "response_mask", "prompt_tokens")
_ROW_MEANS = ("grpo", "sapo", "dr_grpo", "luspo")  # TRL's losses that are means over rows


@dataclass(frozen=True, slots=True)
class RLStep:
    """The batch that this rank has collected for an RL step.

    TRL's own batch is a dict of tensors, which TRL shuffles and splits into micro-batches. Everything else stays here.

    Args:
        episodes: One episode per row, with the rewards assigned by the methods.
        rows: One row of TRL's batch per episode.
        layout: Turns of the rows.
    """

    episodes: list[Episode]
    rows: Sequence[Row]
    layout: TurnLayout

    @classmethod
    def lay_out(
        cls, episodes: list[Episode], context: ContextBuilder, placeholder_id: int, multiple: int | None
    ) -> RLStep:
        """Lays out episodes as rows, padded as TRL pads its completions.

        Args:
            episodes: The episodes.
            context: Context of the rollout.
            placeholder_id: Any valid token id, for episodes without a learning signal.
            multiple: Length of which the padded length is a multiple.
        """
        rows = [episode_to_row(episode, placeholder_id) for episode in episodes]
        layout = TurnLayout(
            _padded([row.turn_ids for row in rows], -1, multiple),
            _padded([row.env_mask for row in rows], 0, multiple),
            torch.tensor([len(row.prompt_ids) for row in rows]),
            windowed=context.is_windowed,
        )
        return cls(episodes, rows, layout)

    @property
    def turn_rewards(self) -> Tensor:
        """(B, K) rewards of the turns, 0 beyond an episode's last turn and for episodes without a learning signal."""
        rewards = [[turn.reward for turn in episode.turns] * episode.is_usable for episode in self.episodes]
        width = max(1, *map(len, rewards))
        return torch.tensor([row + [0.0] * (width - len(row)) for row in rewards])

    def to_rollout_output(self, ranks: Comm) -> dict[str, Any]:
        """Returns the batch in the format of TRL's `rollout_func`. Extra fields reach the reward functions, row by row.

        Collective: if any rank has log-probabilities, a rank whose episodes were all aborted returns them too.
        """
        rows = self.rows
        has_logprobs = any(ranks.gather([any(row.logprobs is not None for row in rows)]))
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.completion_ids for row in rows],
            "env_mask": [row.env_mask for row in rows],
            "logprobs": [row.logprobs or [0.0] * len(row.completion_ids) for row in rows] if has_logprobs else None,
            "episode_return": [episode.total_reward for episode in self.episodes],
            "episode": self.episodes,
        }


def _padded(lists: Sequence[list[int]], value: int, multiple: int | None) -> Tensor:
    tensors = [torch.tensor(row) for row in lists]
    return pad(tensors, padding_value=value, padding_side="right", pad_to_multiple_of=multiple)


def response_mask(inputs: Mapping[str, Any]) -> Tensor:
    """Returns the (B, T) mask, 1 on the tokens that count."""
    return inputs["completion_mask"] * inputs["tool_mask"]


def is_scored(inputs: Mapping[str, Any]) -> bool:
    """Returns whether the batch holds log-probs of the behaviour policy, which TRL keeps for several updates."""
    return "old_per_token_logps" in inputs


def holds_what_the_loss_reads(trainer: Any, parts: Sequence[Mapping[str, Any]] | None) -> bool:
    """Returns whether the parts of a saved batch have what TRL's loss reads with the settings of this run."""
    corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    read = {"ref_per_token_logps": trainer.beta != 0, "importance_sampling_ratio": corrects}
    return all(name in part for part in parts or () for name, is_read in read.items() if is_read)


def behaviour_entries(scores: TokenScores) -> Inputs:
    """Returns the entries of TRL's batch that hold scores under the behaviour policy, beside TRL's log-probs."""
    return {_ENTROPY: scores.entropy, **{_STATISTIC.format(need=need): x for need, x in scores.head.items()}}


def behaviour_scores(inputs: Mapping[str, Any]) -> TokenScores | None:
    """Returns the scores under the behaviour policy in TRL's batch, or `None` if it holds none."""
    if _ENTROPY not in inputs:
        return None
    head = {need: inputs[key] for need in Need if (key := _STATISTIC.format(need=need)) in inputs}
    return TokenScores(inputs["old_per_token_logps"], inputs[_ENTROPY], head)


def layout_entries(layout: TurnLayout, device: torch.device) -> Inputs:
    """Returns a layout's entries in TRL's batch: `turn_ids` on the device, and all its tensors on the CPU."""
    on_cpu = {_LAYOUT.format(name=name): getattr(layout, name) for name in _ON_CPU}
    return {"turn_ids": to_device(layout.turn_ids, device), **on_cpu}


def layout_in(inputs: Mapping[str, Any], context: ContextBuilder) -> TurnLayout:
    """Returns the layout of the rows of TRL's batch, or of a part of it."""
    # A checkpoint within an RL step is loaded to the device as a whole.
    turn_ids, response_mask, prompt_tokens = (inputs[_LAYOUT.format(name=name)].cpu() for name in _ON_CPU)
    return TurnLayout(turn_ids, response_mask, prompt_tokens, context.is_windowed)


def ratio_logps(logps: Tensor, inputs: Mapping[str, Any], methods: Methods) -> Tensor:
    """Returns the (b, T) log-probabilities that TRL compares with the old ones; see `Method.ratio`."""
    old = inputs.get("old_per_token_logps")
    return methods.ratio(logps, logps.detach() if old is None else old, inputs["turn_ids"], response_mask(inputs))


def method_batch(trainer: Any, step: RLStep, inputs: Inputs, scores: TokenScores | None) -> Batch:
    """Builds the `Batch` of a collected batch for the methods. Collective under ZeRO-3."""
    device, first = inputs["turn_ids"].device, trainer.ranks.index * len(step.episodes)
    return Batch(
        episodes=step.episodes,
        group_ids=torch.arange(first, first + len(step.episodes), device=device) // trainer.num_generations,
        turn_rewards=to_device(step.turn_rewards, device),
        group_advantages=inputs["advantages"],
        turn_ids=inputs["turn_ids"],
        mask=response_mask(inputs),
        ranks=trainer.ranks,
        rl_step=trainer.rl_step,
        total_rl_steps=trainer.total_rl_steps,
        scores=scores,
        turn_features=extract_features(trainer, inputs, step.layout),
        candidates=inputs.get("candidates"),
    )


def micro_batch(trainer: Any, inputs: Inputs, scores: TokenScores) -> MicroBatch:
    """Builds the `MicroBatch` for the methods from a part of TRL's batch and the scores of its rows."""
    old = inputs.get("old_per_token_logps")
    return MicroBatch(
        logps=scores.logps,
        entropy=scores.entropy,
        old_logps=scores.logps.detach() if old is None else old,
        advantages=inputs["advantages"],
        turn_ids=inputs["turn_ids"],
        mask=response_mask(inputs),
        num_episodes=inputs["num_episodes"],
        policy_mean=lambda values: (policy_weights(trainer, inputs) * values).sum() / update_scale(trainer),
        rl_step=trainer.rl_step,
        total_rl_steps=trainer.total_rl_steps,
        head=scores.head,
        compute_dtype=compute_dtype(trainer),
    )


def compute_dtype(trainer: Any) -> torch.dtype:
    """Returns the dtype of the policy's logits: that of autocast, or of the weights without autocast."""
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return autocast.get(trainer.accelerator.mixed_precision, trainer.model.dtype)


def update_scale(trainer: Any) -> float:
    """Returns the factor on a part of a mean over the collected batch in the loss of an optimizer step.

    An update uses a part of the batch, and gradients are averaged over ranks. Call it within an optimizer step.
    """
    updates = trainer.args.steps_per_generation / trainer.current_gradient_accumulation_steps
    return updates * trainer.accelerator.num_processes


def row_scale(trainer: Any, inputs: Inputs) -> Tensor | float:
    """Returns the factor that makes TRL's mean over rows a mean over the episodes with a token in the loss.

    It is the number of rows in the batches of all ranks, divided by that of those episodes; 1 for other losses.
    """
    if trainer.loss_type not in _ROW_MEANS:
        return 1.0
    rows = len(inputs["advantages"]) * trainer.args.steps_per_generation * trainer.accelerator.num_processes
    return rows / inputs["num_episodes"].clamp(min=1)


@contextmanager
def averaged_over_episodes(trainer: Any, inputs: Inputs) -> Iterator[Inputs]:
    """Yields the micro-batch with which TRL's policy loss has the factor `row_scale`.

    The policy loss is linear in the advantages and in `beta`, the weight of its KL. The factor must not reach TRL's
    entropy bonus and router loss, which are means over tokens.
    """
    scale, beta = row_scale(trainer, inputs), trainer.beta
    trainer.beta = beta and scale * beta
    try:
        yield {**inputs, "advantages": scale * inputs["advantages"]}
    finally:
        trainer.beta = beta


def policy_weights(trainer: Any, inputs: Inputs) -> Tensor:
    """Returns the (b, T) weights of the tokens in the policy loss of a micro-batch.

    If all ratios are 1, `-(weights * advantages).sum()` has the value of the loss, for the losses with a ratio.
    """
    mask, kind, steps = response_mask(inputs), trainer.loss_type, trainer.current_gradient_accumulation_steps
    if kind in ("cispo", "dapo", "vespo"):  # over the tokens of the whole batch, of which an update uses a part
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        weights = mask / (tokens * steps / trainer.args.steps_per_generation)
    elif kind in ("grpo", "sapo"):
        weights = mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / len(mask) / steps
    elif kind == "bnpo":
        weights = mask / mask.sum().clamp(min=1.0) / steps
    elif kind == "dr_grpo":
        weights = mask / (len(mask) * trainer.max_completion_length) / steps
    else:  # luspo
        weights = mask / len(mask) / steps
    if "importance_sampling_ratio" in inputs and kind != "vespo":  # corrects vLLM's log-probabilities
        weights = weights * inputs["importance_sampling_ratio"]
    return weights * row_scale(trainer, inputs)
