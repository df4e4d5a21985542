"""The critic's own file in a checkpoint, beside a policy that is saved as if there were none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import safetensors.torch
from torch import Tensor

from epo_trl.models.critic import Critic

CRITIC_FILE = "critic.safetensors"


def critic_prefix(model: Any, critic: Critic) -> str:
    """Returns what the names of the critic's parameters begin with in the model."""
    return next(name for name, module in model.named_modules() if module is critic) + "."


def save_critic(folder: str, critic: Critic, state_dict: Mapping[str, Tensor], prefix: str) -> None:
    """Writes what is trained of the critic; nothing if ZeRO-3 was told not to gather the weights."""
    names = [name for name in critic.trained_names() if prefix + name in state_dict]
    if names:
        content = {name: state_dict[prefix + name].detach().cpu().contiguous() for name in names}
        safetensors.torch.save_file(content, os.path.join(folder, CRITIC_FILE), metadata={"format": "pt"})


def check_critic_file(folder: str) -> str:
    """Returns the path of the critic's file; raises `ValueError` if there is none."""
    path = os.path.join(folder, CRITIC_FILE)
    if not os.path.isfile(path):
        raise ValueError(f"resume_from_checkpoint: {path} is missing; the checkpoint was not written by EPOPPOTrainer")
    return path


def load_critic(path: str, critic: Critic) -> None:
    """Reads the critic's file; raises `ValueError` if it holds another kind of critic."""
    saved, expected = safetensors.torch.load_file(path), set(critic.trained_names())
    if saved.keys() != expected:
        raise ValueError(
            f"resume_from_checkpoint: {path} holds another kind of critic: {len(saved.keys() - expected)} "
            f"parameters that this one does not train, {len(expected - saved.keys())} missing; set critic, "
            "critic_use_peft and the models as they were"
        )
    critic.load_state_dict(saved, strict=False)
