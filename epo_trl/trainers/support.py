"""What is not here, refused by field. A new refusal needs one of the two reasons that SUPPORT.md names."""

from __future__ import annotations

from typing import Any

from accelerate.utils import is_peft_model

from epo_trl.errors import InputError
from epo_trl.methods import Methods, Need
from epo_trl.models.adapters import is_adapted
from epo_trl.runs.run_settings import shards_weights

# Arguments of TRL's trainer, and what to do instead.
_ARGUMENTS = {
    "eval_dataset": "evaluation uses the test lists of the suite, `task_ids('iid')` and `task_ids('ood')`",
    "rollout_func": "the trainer plays the suite's environments itself; override `play` to customize the rollout",
    "environment_factory": "environments come from the suite (`make_env`): give it to a `ToolSuite` "
    "(docs/other_worlds.md)",
    "tools": "actions go to the suite's environment; make the tools methods of a class, for a `ToolSuite` "
    "(docs/other_worlds.md)",
}
_NEED_WHOLE_WEIGHTS = {
    "sync_ref_model": "a checkpoint needs the whole weights of the reference model. Use ZeRO-2 or DDP, or no "
    "synchronization",
    "recompute_passes": "the backward pass would read the LM head from a forward pass whose weights are sharded again. "
    "Use gradient_checkpointing",
}


def check_config(args: Any) -> None:
    """Raises `InputError` for a setting of TRL's or transformers' that is not here."""
    if args.num_generations_eval not in (None, 1):
        raise InputError(
            f"num_generations_eval: expected 1 or null, got {args.num_generations_eval}. An evaluation plays every "
            "task of its lists once."
        )
    if args.use_transformers_continuous_batching:
        raise InputError("use_transformers_continuous_batching: expected false, got true; set use_vllm instead")
    if args.disable_dropout and args.neftune_noise_alpha:
        raise InputError(
            f"neftune_noise_alpha: expected null with disable_dropout, got {args.neftune_noise_alpha}. Noise in the "
            "embeddings makes a ratio differ from 1 before any update, as dropout does; leave it out, or set "
            "disable_dropout: false."
        )


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Raises `InputError` for an unsupported argument of TRL's trainer; removes those that are not set."""
    for name, advice in _ARGUMENTS.items():
        if kwargs.pop(name, None):
            raise InputError(f"{name}: expected none; {advice}")


def check_supported(args: Any, model: Any, methods: Methods, kwargs: dict[str, Any], reward_funcs: Any = None) -> None:
    """Raises `InputError` for a combination of settings, methods, processes and adapter that is not here."""
    check_arguments(kwargs)
    own = [name for name, method in methods.items() if method.needs & {Need.TURN_REWARDS, Need.VALUES}]
    for hook in ("turn_rewards", "select"):
        own += methods.overriding(hook)
    if reward_funcs is not None and own:
        raise InputError(f"reward_funcs: expected none with {own[0]!r}, which reads the rewards of the environment")
    for name, why in _NEED_WHOLE_WEIGHTS.items():
        if getattr(args, name) and shards_weights(args):
            raise InputError(f"{name}: expected False with ZeRO-3 or FSDP, got True: {why}")
    adapter = kwargs.get("peft_config") or getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):  # its scores would not be those of the sampled tokens
        raise InputError(
            f"peft_config: expected an adapter of layers, such as LoraConfig, got {type(adapter).__name__}, which adds "
            "virtual tokens to the text"
        )


def check_policy(model: Any, *, vllm: bool) -> None:
    """Raises `InputError` for an encoder, or an adapter that unties embedding and head, which vLLM loads as tied."""
    if model.config.is_encoder_decoder:
        raise InputError(f"model: expected a decoder-only model, got {type(model).__name__}, which has an encoder")
    if not vllm or not is_peft_model(model) or not getattr(model.config, "tie_word_embeddings", False):
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if is_adapted(embedding) or embedding.weight is not head.weight:  # TRL refuses LoRA on the head
        raise InputError(
            "use_vllm: expected False with an adapter on the embedding or the head of a model that ties them, got "
            "True: vLLM would apply each change to both. Remove them from lora_target_modules and "
            "lora_modules_to_save; for an existing adapter, start from its merged checkpoint (epo-trl merge)"
        )
