"""Converts TRL's batch into the inputs of methods, at collection and in each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from epo_trl.devices import to_device
from epo_trl.methods import Batch, Comm, Methods, MicroBatch
from epo_trl.rollout import ContextBuilder
from epo_trl.trainers.policy_mean import policy_mean
from epo_trl.trainers.row_scorer import RowScores
from epo_trl.trainers.turn_layout import TurnLayout
from epo_trl.types import Episode

Inputs = dict[str, Any]
_LAYOUT = "layout/{name}"  # key in TRL's batch, which shuffles and splits CPU tensors like device tensors
_ON_CPU = ("turn_ids", "response_mask", "prompt_tokens")


def response_mask(inputs: Mapping[str, Any]) -> Tensor:
    """Returns the (B, T) mask, 1 on the tokens that count."""
    return inputs["completion_mask"] * inputs["tool_mask"]


def is_scored(inputs: Mapping[str, Any]) -> bool:
    """Returns whether the batch holds log-probs of the behaviour policy, which TRL keeps for several updates."""
    return "old_per_token_logps" in inputs


def behaviour_scores(inputs: Mapping[str, Any], scores: Sequence[RowScores]) -> RowScores | None:
    """Returns the scores under the behaviour policy among those that TRL has requested, if any."""
    return next((one for one in scores if one.log_probs is inputs.get("old_per_token_logps")), None)


def join_rows(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Returns `input_ids` and `attention_mask`, both (B, P + T), and T."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    return ids, mask, inputs["completion_ids"].shape[1]


def layout_entries(layout: TurnLayout, device: torch.device) -> Inputs:
    """Returns a layout's entries in TRL's batch: `turn_ids` on the device, and all its tensors on the CPU."""
    on_cpu = {_LAYOUT.format(name=name): getattr(layout, name) for name in _ON_CPU}
    return {"turn_ids": to_device(layout.turn_ids, device), **on_cpu}


def has_layout(inputs: Mapping[str, Any]) -> bool:
    """Returns whether TRL's batch holds a layout. Checkpoints of earlier versions do not."""
    return all(_LAYOUT.format(name=name) in inputs for name in _ON_CPU)


def layout_in(inputs: Mapping[str, Any], context: ContextBuilder) -> TurnLayout:
    """Returns the layout of the rows of TRL's batch, or of a part of it."""
    # A checkpoint within an RL step is loaded to the device as a whole.
    turn_ids, response_mask, prompt_tokens = (inputs[_LAYOUT.format(name=name)].cpu() for name in _ON_CPU)
    return TurnLayout(turn_ids, response_mask, prompt_tokens, context.is_windowed)


def score_request(inputs: Mapping[str, Any], context: ContextBuilder, methods: Methods) -> dict[str, Any]:
    """Returns the arguments of `RowScorer.expect_rows` for the loss of a part of TRL's batch."""
    return {
        "layout": layout_in(inputs, context),
        "ratio": ratio_in(inputs, methods),
        "with_values": "old_values" in inputs,
        "candidates": inputs.get("candidates"),
        "top_p": methods.top_p,
    }


def ratio_in(inputs: Mapping[str, Any], methods: Methods) -> Callable[[Tensor], Tensor]:
    """Returns a function that maps (b, T) log-probabilities to those that TRL compares with the old ones."""
    old, mask = inputs.get("old_per_token_logps"), response_mask(inputs)
    return lambda logps: methods.ratio(logps, logps.detach() if old is None else old, inputs["turn_ids"], mask)


def method_batch(
    inputs: Inputs,
    episodes: Sequence[Episode],
    scores: RowScores | None,
    ranks: Comm,
    *,
    group_size: int,
    rl_step: int,
    total_rl_steps: int,
) -> Batch:
    """Builds the `Batch` of a collected batch for the methods.

    Args:
        inputs: TRL's batch, with `turn_ids`.
        episodes: Episodes of this rank.
        scores: Scores under the behaviour policy, if known.
        ranks: Communication with the other processes.
        group_size: Number of episodes per task.
        rl_step: Index of the RL step, from 0.
        total_rl_steps: Number of RL steps in the run.
    """
    device, first = inputs["turn_ids"].device, ranks.index * len(episodes)
    return Batch(
        episodes=episodes,
        group_ids=torch.arange(first, first + len(episodes), device=device) // group_size,
        turn_rewards=to_device(_turn_rewards(episodes), device),
        group_advantages=inputs["advantages"],
        turn_ids=inputs["turn_ids"],
        mask=response_mask(inputs),
        ranks=ranks,
        rl_step=rl_step,
        total_rl_steps=total_rl_steps,
        logps=scores.log_probs if scores else None,
        entropy=scores.entropy if scores else None,
        top_p_entropy=scores.top_p_entropy if scores else None,
    )


def _turn_rewards(episodes: Sequence[Episode]) -> Tensor:
    """Returns the (B, K) rewards of the turns, 0 beyond an episode's last turn and for aborted episodes."""
    rewards = [[turn.reward for turn in episode.turns] * episode.is_usable for episode in episodes]
    width = max(1, *map(len, rewards))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rewards])


def micro_batch(trainer: Any, inputs: Inputs, scores: RowScores) -> MicroBatch:
    """Builds the `MicroBatch` of scored rows for the methods.

    Args:
        trainer: An `EPOTrainer`.
        inputs: TRL's batch, or a part of it.
        scores: Scores of its rows.
    """
    assert scores.entropy is not None
    old = inputs.get("old_per_token_logps")
    return MicroBatch(
        logps=scores.log_probs,
        entropy=scores.entropy,
        old_logps=scores.log_probs.detach() if old is None else old,
        advantages=inputs["advantages"],
        turn_ids=inputs["turn_ids"],
        mask=response_mask(inputs),
        num_episodes=inputs["num_episodes"],
        policy_mean=lambda values: policy_mean(trainer, inputs)(values) / update_scale(trainer),
        rl_step=trainer.rl_step,
        total_rl_steps=trainer.total_rl_steps,
        nucleus_entropy=scores.nucleus_entropy,
        choice=(inputs["candidates"] >= 0).any(-1) if "candidates" in inputs else None,
        top_p_entropy=scores.top_p_entropy,
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


def update_seconds(metrics: Mapping[str, Sequence[float]]) -> float | None:
    """Returns the duration of an optimizer step without the rollout, or `None` if none has been timed.

    TRL's step time covers everything between two optimizer steps, including the rollout.

    Args:
        metrics: TRL's metrics since the last log.
    """
    if not metrics.get("step_time"):
        return None
    rollout = sum(sum(metrics.get(f"time/{part}", [])) for part in ("generate", "env", "text"))
    return max(0.0, sum(metrics["step_time"]) - rollout) / max(len(metrics.get("time/generate", [])), 1)
