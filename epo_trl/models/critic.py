"""A critic inside the policy's module, so that one optimizer and one distributed engine serve both; its file.

The critic is a submodule of the policy and is called within the policy's `forward`. Under DDP a call outside it would
not be synchronised; under ZeRO-3 every rank has to make the same calls.
"""

from __future__ import annotations

import copy
import functools
import os
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel
from trl.trainer.utils import FusedCausalLMOutput

from epo_trl.errors import InputError
from epo_trl.models.families import fitted, freeze_unread, turn_off_noise

# In a folder of its own: vLLM reads every safetensors file beside the policy's as weights of the policy.
CRITIC_FILE = os.path.join("critic", "critic.safetensors")


@dataclass
class ScoredOutput(FusedCausalLMOutput):
    """TRL's fused-head output with `state_values` (N, L - 1): the value before the token in the same column.

    Without the head only `state_values` (N, L), after each token. With two heads of the critic, (N, L, 2).
    """

    state_values: Tensor | None = None


class Critic(nn.Module):
    """Estimates the value of a token sequence as a state of an episode, in units of reward.

    The head is initialised with zeros: every value starts at 0 and does not depend on a random seed. The head computes
    in float32 or the precision of its weights, whichever is higher, outside autocast. Without a backbone, a transformer
    without LM head, it reads the policy's hidden states. `token_head` adds a head for the values inside a turn.
    """

    def __init__(
        self,
        hidden_size: int,
        backbone: nn.Module | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        token_head: bool = False,
    ):
        super().__init__()
        self.backbone = backbone
        self.head = _zero_head(hidden_size, dtype)
        self.token_head = _zero_head(hidden_size, dtype) if token_head else None

    def forward(self, hidden: Tensor | None, input_ids: Tensor) -> Tensor:
        """Returns (N, L) values of the states after each token, or (N, L, 2) of both heads.

        `hidden` are the policy's hidden states, (N, L, hidden_size), and `input_ids` (N, L), padded on the right: no
        attention mask is needed.
        """
        if self.backbone is not None:
            hidden = self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        assert hidden is not None
        with torch.autocast(hidden.device.type, enabled=False):
            values = self.head(hidden).squeeze(-1)
            if self.token_head is not None:
                values = torch.stack([values, self.token_head(hidden).squeeze(-1)], dim=-1)
        return values

    def trained_names(self) -> list[str]:
        """Returns the names of the trained parameters, which a checkpoint must contain."""
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad]


class _Head(nn.Linear):
    """Computes in float32 where DeepSpeed holds the weights in half precision: bfloat16 rounds 10.03 to 10."""

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        return F.linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


def _zero_head(hidden_size: int, dtype: torch.dtype) -> nn.Linear:
    head = _Head(hidden_size, 1, dtype=dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def causal_lm(model: Any) -> Any:
    """Returns the causal language model under a PEFT adapter, or the model itself."""
    return model.get_base_model() if is_peft_model(model) else model


def attach_critic(model: Any, critic: Critic) -> None:
    """Adds the critic to the model as a submodule and extends its `forward` to return values.

    `model(..., fused_lm_head=True, with_values=True)` returns a [`ScoredOutput`], and so does
    `model(input_ids=..., values_only=True)`; without either, `forward` is unchanged. Call this after TRL has installed
    its fused head and PEFT has wrapped the model: the policy's adapter must not cover the critic. The model's
    `save_pretrained` leaves the critic out.
    """
    model = causal_lm(model)
    original = model.forward

    # Keep the signature: `generate` validates its arguments against it.
    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, with_values: bool = False, values_only: bool = False, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids")
        if values_only:
            needed = self.critic.backbone is None
            hidden = self.base_model(input_ids=ids, use_cache=False).last_hidden_state if needed else None
            return ScoredOutput(state_values=self.critic(hidden, ids))
        if not with_values:
            return original(*args, **kwargs)
        seen: list[Tensor] = []
        with self.base_model.register_forward_hook(lambda module, args, out: seen.append(out.last_hidden_state)):
            output = original(*args, **kwargs)
        return ScoredOutput(**output, state_values=self.critic(seen[0], ids)[:, :-1])

    model.forward, model.policy_forward = types.MethodType(forward, model), original
    model.critic = critic
    critics = {f"critic.{name}" for name in critic.state_dict()}
    model._keys_to_ignore_on_save = critics.union(model._keys_to_ignore_on_save or ())


def detach_critic(model: Any) -> None:
    """Removes the critic that an earlier trainer has attached to the model, if there is one."""
    model = causal_lm(model)
    if isinstance(getattr(model, "critic", None), Critic):
        del model.critic
        model.forward = vars(model).pop("policy_forward")


@contextmanager
def critic_aside(model: Any) -> Iterator[None]:
    """Detaches the critic while saving, loading or syncing to vLLM, which must see only the policy."""
    owner = causal_lm(model)
    critic = owner.critic
    del owner.critic
    try:
        yield
    finally:
        owner.critic = critic


def copy_of_policy(model: Any, args: Any) -> Any:
    """Copies the policy's transformer for a separate critic to start from; `None` if it must be loaded instead.

    A model in memory may differ from its files, so it is copied before PEFT and TRL change it. One that is quantized,
    wrapped by PEFT or sharded by ZeRO-3 cannot be copied. `args` are an `EPOPPOConfig`.
    """
    if args.critic != "separate" or isinstance(model, str):
        return None
    if is_peft_model(model) or _is_quantized(model) or _is_sharded(model):
        return None
    return copy.deepcopy(model.base_model).requires_grad_(True)


def _is_quantized(model: Any) -> bool:
    return getattr(model, "hf_quantizer", None) is not None


def _is_sharded(model: Any) -> bool:
    """Returns whether ZeRO-3 loaded the model in parts."""
    return any("ds_id" in vars(parameter) for parameter in model.parameters())


def make_critic(
    policy: Any, args: Any, *, backbone: Any = None, peft_config: Any = None, token_head: bool = False
) -> Critic:
    """Builds the critic of an `EPOPPOConfig`.

    `backbone` is the copy of `copy_of_policy`, `peft_config` that of the policy's adapter if it is new; `token_head` is
    explained in `Critic`.
    """
    base = causal_lm(policy)
    if peft_config is None and is_peft_model(policy):
        peft_config = policy.active_peft_config
    # DeepSpeed casts no weight of a model that it loaded in parts, and gathers weights of one precision only.
    one_dtype = _is_sharded(base)
    if args.critic == "separate" and backbone is None:
        revision = getattr(peft_config, "revision", None) or (args.model_init_kwargs or {}).get("revision") or "main"
        # AdamW's updates are lost in the half precision that a quantized policy computes in.
        is_rounded = _is_quantized(base) and not args.critic_use_peft and not one_dtype
        dtype = torch.float32 if is_rounded else base.dtype
        backbone = AutoModel.from_pretrained(
            base.config.name_or_path,
            dtype=dtype,
            attn_implementation=base.config._attn_implementation,
            revision=revision,
            trust_remote_code=args.trust_remote_code,
        )
    if args.critic_use_peft:
        if peft_config is None or backbone is None:
            raise InputError("critic_use_peft: expected False without an adapter, or with a value head, got True")
        dropout = not args.disable_dropout
        backbone = _with_adapter(backbone, peft_config, dropout=dropout, autocast_adapter_dtype=not one_dtype)
    config = (backbone if backbone is not None else base).config.get_text_config()
    dtype = base.dtype if one_dtype else torch.float32
    critic = Critic(config.hidden_size, backbone, dtype, token_head=token_head)
    if backbone is not None:
        freeze_unread(causal_lm(backbone), quiet=True)
    if args.disable_dropout:
        turn_off_noise(critic)
    return critic


def _with_adapter(backbone: nn.Module, peft_config: Any, *, dropout: bool, **kwargs: Any) -> Any:
    """Adds a new adapter with the policy's configuration to the backbone; only the adapter is trained.

    Keyword arguments go to `peft.get_peft_model`.
    """
    from peft import get_peft_model

    config = fitted(peft_config, backbone, dropout=dropout)
    config.task_type = None
    targets, prefix = getattr(config, "target_modules", None), f"{getattr(backbone, 'base_model_prefix', '')}."
    if targets and not isinstance(targets, str):  # PEFT has written `all-linear` out, in the policy's names
        config.target_modules = {name.removeprefix(prefix) for name in targets}
    return get_peft_model(backbone, config, **kwargs)


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
