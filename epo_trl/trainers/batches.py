"""Converts TRL's batch into the inputs of methods, at collection and in each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from epo_trl.devices import to_device
from epo_trl.methods import Batch, Comm, Methods, MicroBatch, Need, TokenScores
from epo_trl.rollout import ContextBuilder
from epo_trl.trainers.rl_step import RLStep
from epo_trl.trainers.scoring.policy_mean import policy_mean
from epo_trl.trainers.scoring.turn_layout import TurnLayout

Inputs = dict[str, Any]
_LAYOUT = "layout/{name}"  # key in TRL's batch, which shuffles and splits CPU tensors like device tensors
_ENTROPY, _STATISTIC = "behaviour/entropy", "behaviour/{need}"  # keys of scores under the behaviour policy
_ON_CPU = ("turn_ids", "response_mask", "prompt_tokens")


def response_mask(inputs: Mapping[str, Any]) -> Tensor:
    """Returns the (B, T) mask, 1 on the tokens that count."""
    return inputs["completion_mask"] * inputs["tool_mask"]


def is_scored(inputs: Mapping[str, Any]) -> bool:
    """Returns whether the batch holds log-probs of the behaviour policy, which TRL keeps for several updates."""
    return "old_per_token_logps" in inputs


def behaviour_entries(scores: TokenScores) -> Inputs:
    """Returns the entries of TRL's batch that hold scores under the behaviour policy, beside TRL's log-probs."""
    return {_ENTROPY: scores.entropy, **{_STATISTIC.format(need=need): x for need, x in scores.head.items()}}


def behaviour_scores(inputs: Mapping[str, Any]) -> TokenScores | None:
    """Returns the scores under the behaviour policy in TRL's batch, or `None` if it holds none."""
    if _ENTROPY not in inputs:
        return None
    head = {need: inputs[key] for need in Need if (key := _STATISTIC.format(need=need)) in inputs}
    return TokenScores(inputs["old_per_token_logps"], inputs[_ENTROPY], head)


def row_ids(inputs: Mapping[str, Any]) -> Tensor:
    """Returns the (B, P + T) token ids of prompt and completion."""
    return torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)


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


def method_batch(
    step: RLStep, inputs: Inputs, scores: TokenScores | None, ranks: Comm, *, group_size: int, rl_step: int, total: int
) -> Batch:
    """Builds the `Batch` of a collected batch for the methods.

    Args:
        step: The collected batch of this rank.
        inputs: TRL's batch, with `turn_ids`.
        scores: Scores under the behaviour policy, if known.
        ranks: Communication with the other processes.
        group_size: Number of episodes per task.
        rl_step: Index of the RL step, from 0.
        total: Number of RL steps in the run.
    """
    device, first = inputs["turn_ids"].device, ranks.index * len(step.episodes)
    return Batch(
        episodes=step.episodes,
        group_ids=torch.arange(first, first + len(step.episodes), device=device) // group_size,
        turn_rewards=to_device(step.turn_rewards, device),
        group_advantages=inputs["advantages"],
        turn_ids=inputs["turn_ids"],
        mask=response_mask(inputs),
        ranks=ranks,
        rl_step=rl_step,
        total_rl_steps=total,
        scores=scores,
        candidates=inputs.get("candidates"),
    )


def micro_batch(trainer: Any, inputs: Inputs, scores: TokenScores) -> MicroBatch:
    """Builds the `MicroBatch` of scored rows for the methods.

    Args:
        trainer: An `EPOTrainer`.
        inputs: TRL's batch, or a part of it.
        scores: Scores of its rows.
    """
    old = inputs.get("old_per_token_logps")
    return MicroBatch(
        logps=scores.logps,
        entropy=scores.entropy,
        old_logps=scores.logps.detach() if old is None else old,
        advantages=inputs["advantages"],
        turn_ids=inputs["turn_ids"],
        mask=response_mask(inputs),
        num_episodes=inputs["num_episodes"],
        policy_mean=lambda values: policy_mean(trainer, inputs)(values) / update_scale(trainer),
        rl_step=trainer.rl_step,
        total_rl_steps=trainer.total_rl_steps,
        head=scores.head,
        compute_dtype=compute_dtype(trainer),
    )


def compute_dtype(trainer: Any) -> torch.dtype:
    """Returns the dtype of the policy's logits: that of autocast, or of the weights without autocast.

    Args:
        trainer: A TRL trainer.
    """
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return autocast.get(trainer.accelerator.mixed_precision, trainer.model.dtype)


def update_scale(trainer: Any) -> float:
    """Returns the factor on a part of a mean over the collected batch in the loss of an optimizer step.

    An update uses a part of the batch, and gradients are averaged over ranks.

    Args:
        trainer: A TRL trainer within an optimizer step.
    """
    updates = trainer.args.steps_per_generation / trainer.current_gradient_accumulation_steps
    return updates * trainer.accelerator.num_processes
