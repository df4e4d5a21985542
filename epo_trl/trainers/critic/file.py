"""Saves and loads the critic in a separate file of a checkpoint. The policy is saved without it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import safetensors.torch
from torch import Tensor

from epo_trl.errors import InputError
from epo_trl.models.critic import Critic

# In a folder of its own: vLLM reads every safetensors file beside the policy's as weights of the policy.
CRITIC_FILE = os.path.join("critic", "critic.safetensors")


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
