"""Reads from a training config what determines its memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from epo_trl.errors import InputError
from epo_trl.lab.memory.sizes import GB, Run

Settings = Mapping[str, Any]


def read_run(
    settings: Settings,
    *,
    gpus: int,
    gpu_gb: float,
    zero_stage: int = 3,
    offload: bool = False,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
) -> tuple[Run, str]:
    """Returns the run of a config, for episodes of `max_turns` turns, and a line on the tokens of a micro-batch.

    Args:
        settings: Fields of `EPOConfig` or `EPOPPOConfig` and `ModelConfig`, as in a YAML file, defaults included.
        gpus: Number of training GPUs.
        gpu_gb: Memory of one of them, in 10^9 bytes, of which a colocated vLLM takes its share.
        zero_stage: See `Run`.
        offload: See `Run`.
        prompt_tokens: Mean prompt tokens of a turn, above 0; with concatenated context, the tokens that a turn adds.
            By default the limit of the config.
        response_tokens: Mean response tokens of a turn, above 0. By default the limit of the config.

    Raises:
        ValueError: If a setting is missing or invalid. The message names the field.
    """
    episodes, turns = _whole(settings, "per_device_train_batch_size"), _whole(settings, "max_turns")
    if prompt_tokens is None and settings.get("context") == "concatenated":
        raise InputError(
            "prompt_tokens: expected the mean number of prompt tokens that a turn adds, got nothing; with context "
            "'concatenated' the config limits only the whole sequence, so pass prompt_tokens"
        )
    prompt = prompt_tokens or _whole(settings, "max_prompt_length")
    response = response_tokens or _whole(settings, "max_completion_length")
    tokens = math.ceil(episodes * turns * (prompt + response))
    colocated = settings.get("use_vllm") and settings.get("vllm_mode") != "server"
    asleep = settings.get("vllm_enable_sleep_mode")
    share = float(settings["vllm_gpu_memory_utilization"]) if colocated and not asleep else 0.0
    # transformers' new name for it, where its version has it, else TRL's
    checkpoints = bool(settings.get("activation_checkpointing", settings.get("gradient_checkpointing")))
    one_pass = bool(settings.get("use_peft")) and zero_stage == 3 and checkpoints
    run = Run(
        gpus=gpus,
        zero_stage=zero_stage,
        offload=offload,
        batch_tokens=tokens,
        pass_tokens=tokens if one_pass else settings.get("tokens_per_pass") or Run.pass_tokens,
        reference=bool(settings.get("beta")) or bool({"ref-nucleus", "archer"} & _methods(settings)),
        critic=settings.get("algorithm") == "ppo" and settings.get("critic") == "separate",
        gradient_checkpointing=checkpoints,
        recompute_passes=bool(settings.get("recompute_passes")),
        lora_rank=_whole(settings, "lora_r") if settings.get("use_peft") else 0,
        critic_lora=bool(settings.get("critic_use_peft")),
        vllm_bytes=share * gpu_gb * GB,
    )
    source = (
        f"per_device_train_batch_size {episodes} x max_turns {turns} x ({prompt:g} + {response:g}) tokens of a turn"
    )
    return run, f"tokens of a micro-batch: {tokens:,} = {source}"


def _whole(settings: Settings, name: str) -> int:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise InputError(f"{name}: expected an integer >= 1, got {value!r}")
    return int(value)


def _methods(settings: Settings) -> set[str]:
    """Returns the names of all methods."""
    slots = (settings.get(slot) or [] for slot in ("credit", "entropy_method", "policy_method"))
    return {name for names in slots for name in ([names] if isinstance(names, str) else names)}
