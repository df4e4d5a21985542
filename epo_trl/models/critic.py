"""A critic inside the policy's module, so that one optimizer and one distributed engine serve both.

The critic is a submodule of the policy and is called within the policy's `forward`. Under DDP a call outside it would
not be synchronised; under ZeRO-3 every rank has to make the same calls.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel
from transformers.utils import ModelOutput
from trl.trainer.utils import FusedCausalLMOutput

from epo_trl.models.families import fitted


@dataclass
class ScoredOutput(FusedCausalLMOutput):
    """TRL's fused-head output with `state_values` (N, L - 1): the value before the token in the same column.

    (N, L - 1, 2) from a critic with two heads.
    """

    state_values: Tensor | None = None


@dataclass
class ValueOutput(ModelOutput):
    """`state_values` (N, L): the value of the state after each token; (N, L, 2) from a critic with two heads."""

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

    `model(..., fused_lm_head=True, with_values=True)` returns a [`ScoredOutput`] and
    `model(input_ids=..., values_only=True)` a [`ValueOutput`]; without either, `forward` is unchanged. Call this after
    TRL has installed its fused head and PEFT has wrapped the model: the policy's adapter must not cover the critic.
    The model's `save_pretrained` leaves the critic out.
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
            return ValueOutput(state_values=self.critic(hidden, ids))
        if not with_values:
            return original(*args, **kwargs)
        seen: list[Tensor] = []
        hook = self.base_model.register_forward_hook(lambda module, args, out: seen.append(out.last_hidden_state))
        try:
            output = original(*args, **kwargs)
        finally:
            hook.remove()
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


def copied_backbone(policy: Any) -> Any:
    """Copies the policy's transformer without its LM head; all weights are trained."""
    return copy.deepcopy(policy.base_model).requires_grad_(True)


def loaded_backbone(path: str, policy: Any, **kwargs: Any) -> Any:
    """Loads a transformer by Hub id or local path, by default with the policy's precision and attention."""
    own = {"dtype": policy.dtype, "attn_implementation": policy.config._attn_implementation}
    return AutoModel.from_pretrained(path, **own | kwargs)


def with_adapter(backbone: nn.Module, peft_config: Any, *, dropout: bool, **kwargs: Any) -> Any:
    """Adds a new adapter with the policy's configuration to the backbone; only the adapter is trained.

    `dropout` is whether the adapter keeps its dropout. Keyword arguments go to `peft.get_peft_model`.
    """
    from peft import get_peft_model

    config = fitted(peft_config, backbone, dropout=dropout)
    config.task_type = None
    targets, prefix = getattr(config, "target_modules", None), f"{getattr(backbone, 'base_model_prefix', '')}."
    if targets and not isinstance(targets, str):  # PEFT has written `all-linear` out, in the policy's names
        config.target_modules = {name.removeprefix(prefix) for name in targets}
    return get_peft_model(backbone, config, **kwargs)
