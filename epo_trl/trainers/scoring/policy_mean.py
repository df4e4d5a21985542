"""The mean over tokens in each of TRL's policy losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from epo_trl.errors import InputError

Mean = Callable[[Tensor], Tensor]


def policy_mean(trainer: Any, inputs: dict[str, Any]) -> Mean:
    """Returns a function that sums (b, T) token values with the token weights of a micro-batch's loss.

    If all ratios are 1, `-policy_mean(advantages)` has the value of TRL's policy loss, for the losses with a ratio.

    Args:
        trainer: A TRL trainer within an optimizer step.
        inputs: The micro-batch.
    """
    mask, steps = inputs["completion_mask"] * inputs["tool_mask"], trainer.current_gradient_accumulation_steps
    kind = trainer.loss_type
    if kind in ("cispo", "dapo", "vespo"):  # over the tokens of the whole batch, of which an update uses a part
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        weights = mask / (tokens * steps / trainer.args.steps_per_generation)
    elif kind in ("grpo", "sapo"):
        weights = mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / len(mask) / steps
    elif kind == "bnpo":
        weights = mask / mask.sum().clamp(min=1.0) / steps
    elif kind == "dr_grpo":
        weights = mask / (len(mask) * trainer.max_completion_length) / steps
    elif kind == "luspo":
        weights = mask / len(mask) / steps
    else:
        raise InputError(f"loss_type: expected a loss with a known mean over tokens, got {kind!r}")
    if "importance_sampling_ratio" in inputs and kind != "vespo":  # corrects vLLM's log-probabilities
        weights = weights * inputs["importance_sampling_ratio"]
    return lambda values: (weights * values).sum()
