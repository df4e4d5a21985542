"""Builds the critic, hides it from the reference model and vLLM, and keeps it in a file beside the policy's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import safetensors.torch
import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.callbacks import SyncRefModelCallback

from epo_trl.errors import InputError
from epo_trl.models.critic import Critic, causal_lm, copied_backbone, critic_aside, loaded_backbone, with_adapter
from epo_trl.models.families import freeze_unread, turn_off_noise
from epo_trl.trainers.ppo_config import EPOPPOConfig

# In a folder of its own: vLLM reads every safetensors file beside the policy's as weights of the policy.
CRITIC_FILE = os.path.join("critic", "critic.safetensors")


def copy_of_policy(model: Any, args: EPOPPOConfig) -> Any:
    """Copies the policy for a separate critic to start from. Returns `None` if the critic must be loaded instead.

    A model in memory may differ from its files, so it is copied before PEFT and TRL change it. One that is quantized,
    wrapped by PEFT or sharded by ZeRO-3 cannot be copied.
    """
    if args.critic != "separate" or isinstance(model, str):
        return None
    if is_peft_model(model) or _is_quantized(model) or _is_sharded(model):
        return None
    return copied_backbone(model)


def _is_quantized(model: Any) -> bool:
    return getattr(model, "hf_quantizer", None) is not None


def _is_sharded(model: Any) -> bool:
    """Returns whether ZeRO-3 loaded the model in parts."""
    return any("ds_id" in vars(parameter) for parameter in model.parameters())


def make_critic(
    policy: Any, args: EPOPPOConfig, *, backbone: Any = None, peft_config: Any = None, token_head: bool = False
) -> Critic:
    """Builds the critic of the configuration.

    `backbone` is the copy of `copy_of_policy`, `peft_config` that of the policy's adapter if it is new; `token_head` is
    explained in `Critic`.
    """
    base = causal_lm(policy)
    if peft_config is None and is_peft_model(policy):
        peft_config = policy.active_peft_config
    # DeepSpeed casts no weight of a model that it loaded in parts, and gathers weights of one precision only.
    one_dtype = _is_sharded(base)
    if args.critic == "separate" and backbone is None:
        backbone = _load_backbone(base, args, getattr(peft_config, "revision", None))
    if args.critic_use_peft:
        if peft_config is None:
            raise InputError("critic_use_peft: expected False for a policy without an adapter, got True")
        backbone = with_adapter(
            backbone, peft_config, dropout=not args.disable_dropout, autocast_adapter_dtype=not one_dtype
        )
    config = (backbone if backbone is not None else base).config.get_text_config()
    dtype = base.dtype if one_dtype else torch.float32
    critic = Critic(config.hidden_size, backbone, dtype, token_head=token_head)
    if backbone is not None:
        freeze_unread(causal_lm(backbone), quiet=True)
    if args.disable_dropout:
        turn_off_noise(critic)
    return critic


def _load_backbone(policy: Any, args: EPOPPOConfig, adapter_revision: str | None) -> Any:
    """Loads the policy's transformer again, in the revision that the policy's adapter records."""
    revision = adapter_revision or (args.model_init_kwargs or {}).get("revision") or "main"
    # AdamW's updates are lost in the half precision that a quantized policy computes in.
    is_rounded = _is_quantized(policy) and not args.critic_use_peft and not _is_sharded(policy)
    dtype = torch.float32 if is_rounded else policy.dtype
    trust = {"trust_remote_code": args.trust_remote_code}
    return loaded_backbone(policy.config.name_or_path, policy, dtype=dtype, revision=revision, **trust)


def hide_critic(trainer: GRPOTrainer) -> None:
    """Hides the critic from TRL's reference model and its generation.

    The reference model has no critic, and `sync_ref_model` pairs all parameters of both models. vLLM has no critic, and
    TRL sends it all parameters.
    """

    def without_critic(sync: Callable[..., None]) -> Callable[..., None]:
        def sync_policy(*args: Any) -> None:
            with critic_aside(trainer.model):
                sync(*args)

        return sync_policy

    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, SyncRefModelCallback):
            callback.sync_target_model = without_critic(callback.sync_target_model)
    if trainer.use_vllm:
        trainer.vllm_generation.sync_weights = without_critic(trainer.vllm_generation.sync_weights)


def critic_prefix(model: Any, critic: Critic) -> str:
    """Returns the prefix of the critic's parameter names in the model."""
    return next(name for name, module in model.named_modules() if module is critic) + "."


def save_critic(folder: str, critic: Critic, state_dict: Mapping[str, Tensor], prefix: str) -> None:
    """Writes the trained parameters of the critic. Does nothing if ZeRO-3 is configured not to gather the weights."""
    names = [name for name in critic.trained_names() if prefix + name in state_dict]
    if names:
        path = os.path.join(folder, CRITIC_FILE)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        content = {name: state_dict[prefix + name].detach().cpu().contiguous() for name in names}
        safetensors.torch.save_file(content, path, metadata={"format": "pt"})


def load_critic(path: str, critic: Critic) -> None:
    """Loads the critic's file; raises `InputError` if it holds another kind of critic."""
    saved, expected = safetensors.torch.load_file(path), set(critic.trained_names())
    if saved.keys() != expected:
        raise InputError(
            f"resume_from_checkpoint: expected the same kind of critic, got {path} with {len(saved.keys() - expected)} "
            f"extra and {len(expected - saved.keys())} missing parameters. Set critic, critic_use_peft and the models "
            "as in the original run."
        )
    critic.load_state_dict(saved, strict=False)
