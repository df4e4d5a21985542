"""Settings of a run: checks that transformers makes late or never, and the comparison with those of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from torch.optim.lr_scheduler import LambdaLR
from transformers.trainer_utils import SaveStrategy

from epo_trl.bounds import Count, NonNegative, check_bounds, option
from epo_trl.errors import InputError, differences
from epo_trl.runs.files import STATE_FILE, last_checkpoint, read_state, what_model
from epo_trl.runs.run_lock import on_main_process

BOUNDS = {  # torch checks the other settings of an optimizer
    **dict.fromkeys(("learning_rate", "max_grad_norm"), NonNegative),
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), Count),
}


@dataclass
class LongRunArguments:
    """How a run is resumed."""

    resume_with_changes: bool = option(
        False, "Resume although the number of processes or a setting that affects the result has changed."
    )
    trust_checkpoint: bool = option(
        False,
        "Allow resume_from_checkpoint to be a folder outside output_dir. Use it only if you trust its source: the "
        "files of DeepSpeed and FSDP are unpickled, which can run code.",
    )
    restore_callback_states_from_checkpoint: bool = option(
        True, "Restore the state of callbacks, as of EarlyStoppingCallback."
    )

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the token of the Hub out of a pickle: `training_args.bin` is uploaded with the model."""
        return {**vars(self), "hub_token": None}


def check_training_arguments(args: Any) -> None:
    """Raises `InputError` for an invalid optimizer setting, or a saving that breaks exact resume."""
    check_bounds(args, BOUNDS)
    if args.save_only_model:
        raise InputError(
            "save_only_model: expected false, got true. A run cannot resume from weights alone: the optimizer, the "
            "schedule and the random state would restart. The final model is saved without them; to save disk space, "
            "lower save_total_limit"
        )
    if args.save_strategy == SaveStrategy.BEST:
        raise InputError(
            "save_strategy: expected 'steps', 'epoch' or 'no', got 'best', which saves nothing until an evaluation is "
            "the best so far, not even on SIGTERM. Use 'steps' and load_best_model_at_end: true, which keeps the best"
        )


def uses_zero3(args: Any) -> bool:
    """Returns whether DeepSpeed shards the weights."""
    return args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3


def shards_weights(args: Any) -> bool:
    """Returns whether no rank has whole weights: with ZeRO-3, or FSDP by the training config or by accelerate's."""
    return uses_zero3(args) or bool(args.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP"))


def warn_rounded_updates(trainer: Any) -> None:
    """Warns if the optimizer updates weights in half precision, where most updates are rounded away.

    DeepSpeed updates float32 copies, and accelerate casts the weights for FSDP with mixed precision. A quantized base
    is left out: TRL keeps its adapter in bfloat16, as QLoRA does.
    """
    args, model = trainer.args, trainer.model
    is_fsdp = trainer.is_fsdp_enabled and trainer.accelerator.mixed_precision != "no"
    is_quantized = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    if trainer.is_deepspeed_enabled or is_fsdp or is_quantized or args.process_index:
        return
    trained = {weight.dtype for weight in model.parameters() if weight.requires_grad}
    for dtype in trained & {torch.bfloat16, torch.float16}:
        warnings.warn(
            f"dtype: expected float32 for weights that are trained, got {str(dtype).removeprefix('torch.')}, which "
            f"rounds an update below 1/{4 / torch.finfo(dtype).eps:.0f} of a weight to nothing; AdamW's are about "
            f"learning_rate ({args.learning_rate}). Set dtype: float32, with bf16: true if layers are to compute in "
            "bfloat16, or use ZeRO or FSDP with mixed precision, which update float32 weights",
            stacklevel=3,
        )


# Configuration fields that affect logging, saving or speed, but not what is learned. Every other field of TRL,
# transformers or this package must stay the same.
MAY_CHANGE = frozenset(
    """output_dir run_name project trackio_space_id trackio_bucket_id trackio_static_space_id report_to
    logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level
    log_level_replica disable_tqdm print_episodes keep_episodes keep_episodes_steps
    log_completions log_multimodal num_completions_to_print
    log_unique_prompts log_completions_hub_repo include_num_input_tokens_seen
    eval_strategy eval_steps eval_delay eval_on_start per_device_eval_batch_size eval_accumulation_steps eval_episodes
    eval_seed eval_temperature protocol num_generations_eval prediction_loss_only eval_do_concat_batches
    eval_use_gather_object include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval
    save_strategy save_steps save_on_each_node save_total_limit save_only_model enable_jit_checkpoint
    load_best_model_at_end metric_for_best_model greater_is_better
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    do_train do_eval do_predict resume_from_checkpoint resume_with_changes trust_checkpoint max_skipped_updates
    max_aborted_share env_workers env_step_seconds
    restore_callback_states_from_checkpoint debug skip_memory_metrics torch_empty_cache_steps local_rank
    activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
    gradient_checkpointing_above
    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context ddp_timeout ddp_backend deepspeed fsdp fsdp_config model_init_kwargs
    trust_remote_code vllm_enable_sleep_mode vllm_server_base_url vllm_server_host vllm_server_port
    vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization""".split()
)
# Settings that name a model: a folder of weights or a Hub id.
MODELS = ("model", "adapter_weights")
# Settings as written. `methods` and `template`, with defaults and without a path, are compared instead.
RESOLVED = frozenset(("method_kwargs", "prompt_template"))


def settings_of(trainer: Any) -> dict[str, Any]:
    """Returns all settings that affect what a run learns, as plain JSON types.

    These are the configuration fields outside `MAY_CHANGE`, the number of processes and how they share the model, the
    model and how it was loaded, the adapter, and the trainer's `settings_of_data`. A model folder is identified by its
    weights, so it may be moved but not overwritten.
    """
    args, accelerator = trainer.args, trainer.accelerator
    plugin = accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    adapters = getattr(trainer.model, "peft_config", None) or {}
    settings = {
        "world_size": accelerator.num_processes,
        "distributed_type": accelerator.distributed_type,
        "zero_stage": plugin.zero_stage if plugin is not None else None,
        "mixed_precision": accelerator.mixed_precision,
        "model": trainer.model.config.name_or_path,
        **trainer.load_settings,
        "adapter": {name: config.to_dict() | {"base_model_name_or_path": None} for name, config in adapters.items()},
        **trainer.settings_of_data(),
    }
    settings |= _of_arguments(args)
    for name in MODELS:
        if settings.get(name):
            settings[name] = on_main_process(args, partial(what_model, settings[name]))
    return json.loads(json.dumps(settings, default=_plain))


def _of_arguments(args: Any) -> dict[str, Any]:
    return {name: value for name, value in args.to_dict().items() if name not in MAY_CHANGE | RESOLVED}


def load_settings(model: Any, args: Any) -> dict[str, Any]:
    """Returns how a model was built or loaded, as far as it affects the result. Training may cast it afterwards."""
    quantization = getattr(model.config, "quantization_config", None)
    return {
        "dtype": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})),
        "model_revision": (args.model_init_kwargs or {}).get("revision") or "main",
        "built_model": getattr(model, "built_as", None),
        "adapter_weights": getattr(model, "adapter_source", None),
        "quantization": quantization if isinstance(quantization, dict | None) else quantization.to_dict(),
    }


@contextmanager
def configured_rates(optimizer: Any, scheduler: Any) -> Iterator[None]:
    """Keeps the learning rates, betas, epsilon and weight decay of the configuration, while the block loads those of a
    checkpoint. Unchanged settings give the checkpoint's learning rate, bit by bit.
    """
    names = ("initial_lr", "betas", "eps", "weight_decay")
    own = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
    rates = list(getattr(scheduler, "base_lrs", ()))
    yield
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = rates
        for group, rate, schedule in zip(optimizer.param_groups, rates, scheduler.lr_lambdas, strict=True):
            group["lr"] = rate * schedule(scheduler.last_epoch)
        scheduler.get_last_lr()[:] = [group["lr"] for group in optimizer.param_groups]  # the list itself: logs read it


def model_digest(items: Iterable[Any], what: str) -> str:
    """Returns the count and checksum of JSON-serializable items, for example `8 tasks, sha256 0123456789ab`."""
    listed = list(items)
    return f"{len(listed)} {what}, sha256 {hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:12]}"


def content_digest(value: Any) -> str:
    """Returns the checksum of any value, the same in every process."""
    return hashlib.sha256(json.dumps(_to_json(value)).encode()).hexdigest()


def _to_json(value: Any) -> Any:
    """Converts a value to JSON that is equal in every process; rows may contain arrays, images, or any object."""
    if isinstance(value, Mapping):
        return {"mapping": sorted(([repr(key), _to_json(each)] for key, each in value.items()), key=itemgetter(0))}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_to_json(each)) for each in value)
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, bytes | bytearray):
        return hashlib.sha256(value).hexdigest()
    if hasattr(value, "tobytes"):
        shape = [repr(getattr(value, name, None)) for name in ("dtype", "shape", "mode", "size")]
        return [*shape, hashlib.sha256(value.tobytes()).hexdigest()]
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _plain(value: Any) -> Any:
    """Returns JSON types for a value that `json` cannot write."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    return dict(value) if isinstance(value, Mapping) else type(value).__name__


def newest_checkpoint(args: Any) -> str | None:
    """Returns the newest complete checkpoint in `output_dir`, or `None`. Collective."""
    return on_main_process(args, partial(last_checkpoint, args.output_dir))


def check_folder(args: Any, known: Mapping[str, Any]) -> None:
    """Raises `InputError` if `output_dir` holds a run with other settings than those `known` so far. Collective."""
    newest = newest_checkpoint(args)
    if newest is not None and not args.resume_with_changes:
        now = json.dumps({**_of_arguments(args), **known}, default=_plain)
        check_checkpoint(args, newest, json.loads(now))


def check_checkpoint(args: Any, checkpoint: str, now: Mapping[str, Any]) -> None:
    """Raises `InputError` if a checkpoint is not trusted, or has other settings; warns with `resume_with_changes`."""
    own = os.path.realpath(args.output_dir)
    if os.path.commonpath([own, os.path.realpath(checkpoint)]) != own and not args.trust_checkpoint:
        raise InputError(
            f"resume_from_checkpoint: expected a folder in output_dir ({args.output_dir}), got {checkpoint}: a "
            "checkpoint from another source can run code when it is loaded. Set trust_checkpoint to true if you trust "
            "its source"
        )
    lines = differences(read_state(os.path.join(checkpoint, STATE_FILE), "settings")["settings"], now)
    if lines and not args.resume_with_changes:
        raise InputError(
            f"resume_from_checkpoint: {checkpoint} was made with other settings, so the result would match neither "
            "run:\n  " + ";\n  ".join(lines) + ".\nUse another output_dir, restore them, or set resume_with_changes "
            "to true to resume anyway"
        )
    if lines:
        warnings.warn(f"{checkpoint} is resumed with other settings: {'; '.join(lines)}", stacklevel=5)
