"""Derives the size of a run from its config: episodes, updates, tokens, passes over the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]

# Methods with `Need.SCORES`: they add a forward pass where TRL does not compute old log-probabilities.
WITH_SCORES = {"ea", "aem", "empg", "clip-cov", "kl-cov", "steer", "entrocraft", "aepo", "decision-bonus", "siren"}


def whole(settings: Settings, name: str, least: int = 1) -> int:
    """Returns an integer setting.

    Raises:
        ValueError: If the setting is not an integer, or is below `least`.
    """
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < least:
        raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")
    return int(value)


@dataclass(frozen=True)
class Batch:
    """The sizes of an RL step (docs/concepts.md).

    Args:
        episodes: Episodes per RL step, over all training GPUs.
        tasks: Tasks per RL step; the episodes of one task form a group.
        updates: Optimizer steps per RL step.
        rl_steps: RL steps of the run.
        per_gpu: Episodes per forward pass on one GPU.
        rounds: Forward passes with gradient per GPU and RL step: `steps_per_generation` x `num_iterations`.
        why: Explanation of `episodes`.
        why_rl_steps: Explanation of `rl_steps`.
    """

    episodes: int
    tasks: int
    updates: float
    rl_steps: float
    per_gpu: int
    rounds: int
    why: str
    why_rl_steps: str


def batch_of(settings: Settings, gpus: int, rl_steps: int | None = None) -> Batch:
    """Computes the sizes of an RL step from a config.

    Args:
        settings: Fields of `EPOConfig` or `EPOPPOConfig`, as in a YAML file, defaults included.
        gpus: Number of training GPUs.
        rl_steps: RL steps of the run; by default derived from `max_steps`.

    Raises:
        ValueError: If a field is not a valid number, or the group size does not divide the batch.
    """
    per_gpu = whole(settings, "per_device_train_batch_size")
    accumulation = whole(settings, "gradient_accumulation_steps")
    steps = _steps_per_generation(settings, per_gpu * gpus, accumulation)
    iterations = whole(settings, "num_iterations")
    group = whole(settings, "num_generations")
    episodes = per_gpu * steps * gpus
    why = f"per_device_train_batch_size {per_gpu} x steps_per_generation {steps} x GPUs that train {gpus}"
    if episodes % group:
        raise ValueError(
            f"num_generations: expected a divisor of {episodes}, the episodes of an RL step ({why}), got {group}"
        )
    updates = steps * iterations / accumulation
    if rl_steps is not None:
        return Batch(episodes, episodes // group, updates, rl_steps, per_gpu, steps * iterations, why, "as given")
    max_steps = settings.get("max_steps")
    if not isinstance(max_steps, int) or max_steps < 1:
        raise ValueError(
            f"max_steps: expected an integer >= 1, got {max_steps!r}; the number of tasks per epoch is unknown, "
            "so set max_steps or pass rl_steps"
        )
    return Batch(
        episodes, episodes // group, updates, max_steps / updates, per_gpu, steps * iterations, why,
        f"max_steps {max_steps} / {updates:g} optimizer steps of an RL step",
    )  # fmt: skip


def _steps_per_generation(settings: Settings, rows: int, accumulation: int) -> int:
    """Returns TRL's `steps_per_generation`, derived from `generation_batch_size` if it is not set."""
    if settings.get("steps_per_generation") is not None:
        return whole(settings, "steps_per_generation")
    if settings.get("generation_batch_size") is None:
        return accumulation
    size = whole(settings, "generation_batch_size")
    if size % rows:
        raise ValueError(
            f"generation_batch_size: expected a multiple of {rows}, the rows of one step on all GPUs, got {size}"
        )
    return size // rows


@dataclass(frozen=True)
class Passes:
    """The compute of an RL step's updates, in units of one forward pass over the batch.

    Args:
        policy: Passes over the policy, with and without gradient.
        critic: Passes over a separate critic, which has no LM head.
        why: Explanation of the sum.
    """

    policy: float
    critic: float
    why: str


def count_passes(settings: Settings, rounds: int) -> Passes:
    """Counts the passes that the updates of an RL step need.

    A backward pass costs two forward passes, or one if only an adapter is trained, because the frozen weights need no
    gradient. Gradient checkpointing adds one forward pass.

    Args:
        settings: As for `batch_of`.
        rounds: See `Batch`.
    """
    iterations = whole(settings, "num_iterations")
    checkpointing = 1 if settings.get("gradient_checkpointing") else 0
    lora = bool(settings.get("use_peft"))
    again = ", and once more for gradient checkpointing" if checkpointing else ""
    words = [f"forward and backward ({'1 + 1, LoRA' if lora else '1 + 2'}{again})"]
    if iterations > 1:
        words[0] += f" x num_iterations {iterations}"
    policy = iterations * (1 + (1 if lora else 2) + checkpointing)
    corrected = settings.get("use_vllm") and settings.get("vllm_importance_sampling_correction", True)
    if corrected or whole(settings, "gradient_accumulation_steps") % rounds:
        policy += 1
        words.append("old log-probabilities (1)")
    elif WITH_SCORES & _methods(settings):
        policy += 1
        words.append("scores of the behaviour policy (1)")
    if (references := _reference_passes(settings)) > 0:
        policy += references
        words.append(f"reference ({references})")
    if not has_critic(settings):
        return Passes(policy, 0, ", ".join(words))
    trained = 1 + (1 if settings.get("critic_use_peft") else 2) + checkpointing
    return Passes(
        policy, iterations * trained + 1, ", ".join([*words, f"critic ({iterations * trained} + 1 for values)"])
    )


def has_reference(settings: Settings) -> bool:
    """Whether the run needs a reference model: for a KL term, `ref-nucleus` or `archer`."""
    return _reference_passes(settings) > 0


def _reference_passes(settings: Settings) -> int:
    """Counts the KL term, `ref-nucleus` and `archer`; each needs its own pass over the reference model."""
    return bool(settings.get("beta")) + len({"ref-nucleus", "archer"} & _methods(settings))


def _methods(settings: Settings) -> set[str]:
    """Returns the names of all methods."""
    slots = (settings.get(slot) or [] for slot in ("credit", "entropy_method", "policy_method"))
    return {name for names in slots for name in ([names] if isinstance(names, str) else names)}


def has_critic(settings: Settings) -> bool:
    """Whether there is a critic with its own backbone."""
    return settings.get("algorithm") == "ppo" and settings.get("critic") == "separate"


def count_evaluations(settings: Settings, rl_steps: float, updates: float) -> int:
    """Returns the number of evaluations in a run."""
    first = 1 if settings.get("eval_on_start") else 0
    every = settings.get("eval_steps") or settings.get("logging_steps")
    if settings.get("eval_strategy") != "steps" or not isinstance(every, int | float) or every <= 0:
        return first
    total = rl_steps * updates
    return first + math.floor(total / (every if every >= 1 else math.ceil(every * total)) + 1e-9)
