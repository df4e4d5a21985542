"""Makes the critic of a policy, and keeps it out of sight of what has to see the policy alone."""

from __future__ import annotations

from typing import Any

from accelerate.utils import is_peft_model
from trl import GRPOTrainer
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import disable_dropout_in_model

from epo_trl.models.critic import Critic, causal_lm, copied_backbone, critic_aside, loaded_backbone, with_adapter
from epo_trl.trainers.checks import check_backbone, check_critic_vocabulary
from epo_trl.trainers.ppo_config import EPOPPOConfig


def copy_of_policy(model: Any, args: EPOPPOConfig) -> Any:
    """Returns a copy of the policy for a separate critic to start from, or `None` if it has to be loaded instead.

    An object in memory may differ from the files it came from, so it is copied, before PEFT and TRL change it.
    """
    return copied_backbone(model) if args.critic == "separate" and _can_be_copied(model, args) else None


def _can_be_copied(model: Any, args: EPOPPOConfig) -> bool:
    """Whether the weights are here, whole and plain: not a name, not wrapped by PEFT, not split by ZeRO-3."""
    if isinstance(model, str) or args.critic_model_name_or_path is not None or is_peft_model(model):
        return False
    if getattr(model, "hf_quantizer", None) is not None:
        return False
    return not any("ds_id" in vars(parameter) for parameter in model.parameters())


def make_critic(
    policy: Any, args: EPOPPOConfig, tokenizer: Any, *, backbone: Any = None, peft_config: Any = None
) -> Critic:
    """Returns the critic that the configuration asks for.

    Args:
        policy: The trainer's model.
        args: The configuration.
        tokenizer: The policy's.
        backbone: See `copy_of_policy`.
        peft_config: Of the policy's adapter, if it is a new one.

    Raises:
        ValueError: If the policy cannot have such a critic.
    """
    base = causal_lm(policy)
    if peft_config is None and is_peft_model(policy):
        peft_config = policy.active_peft_config
    check_backbone(args.critic, base, peft_config)
    if args.critic == "separate" and backbone is None:
        backbone = _load_backbone(base, args, tokenizer)
    if args.critic_use_peft:
        if peft_config is None:
            raise ValueError("critic_use_peft: got True for a policy without adapter, takes False then")
        backbone = with_adapter(backbone, peft_config)
    config = (backbone if backbone is not None else base).config.get_text_config()
    critic = Critic(config.hidden_size, backbone)
    if args.disable_dropout:
        disable_dropout_in_model(critic)
    return critic


def _load_backbone(policy: Any, args: EPOPPOConfig, tokenizer: Any) -> Any:
    other = args.critic_model_name_or_path
    path = other or policy.config.name_or_path
    if not path:
        raise ValueError(
            "critic: got 'separate' for a policy that was made in memory and is wrapped already; takes the plain "
            "model with peft_config, or a critic_model_name_or_path"
        )
    trust = {"trust_remote_code": args.trust_remote_code}
    revision = None if other else (args.model_init_kwargs or {}).get("revision")
    backbone = loaded_backbone(path, policy, revision=revision or "main", **trust)
    if other:
        check_critic_vocabulary(path, backbone.config.get_text_config().vocab_size, tokenizer, **trust)
    return backbone


def hide_critic(trainer: GRPOTrainer) -> None:
    """Lets TRL's reference model and its generation see a policy without critic.

    The reference model has none, and `sync_ref_model` pairs every parameter with one of its own; vLLM has none, and TRL
    sends it every parameter of the model. For continuous batching TRL casts the whole model to the precision of the
    run and leaves it there, the critic and its head in float32 too; DeepSpeed has its own precisions.
    """
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, SyncRefModelCallback):
            sync = callback.sync_target_model

            def sync_policy(model: Any, *args: Any, sync: Any = sync) -> None:
                with critic_aside(model):
                    sync(model, *args)

            callback.sync_target_model = sync_policy
    if trainer.use_vllm:
        sync_weights = trainer.vllm_generation.sync_weights

        def sync_policy_weights() -> None:
            with critic_aside(trainer.model):
                sync_weights()

        trainer.vllm_generation.sync_weights = sync_policy_weights
    if trainer.use_transformers_continuous_batching and not trainer.is_deepspeed_enabled:
        trainer.player.generator.around = lambda: critic_aside(trainer.model)
