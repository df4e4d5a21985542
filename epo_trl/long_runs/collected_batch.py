"""Tensors stored in a checkpoint: the batch in use inside an RL step, and the learned state of methods."""

from __future__ import annotations

import os
from typing import Any

import torch

LEARNED = "learned_by_methods.pt"
# The output of TRL's `_prepare_inputs` for a rollout, with statistics added. Plain containers of tensors.
State = dict[str, Any]


def _path(folder: str, rank: int) -> str:
    return os.path.join(folder, f"collected_batch_{rank}.pt")


def save_batch(folder: str, rank: int, state: State) -> None:
    """Saves this rank's part of the batch."""
    torch.save(state, _path(folder, rank))


def load_batch(folder: str, rank: int, device: torch.device) -> State | None:
    """Loads this rank's part of the batch, or returns `None` if the checkpoint was made by fewer ranks."""
    return _load(_path(folder, rank), device)


def save_learned(folder: str, state: State) -> None:
    """Saves the learned state of methods, if any; it is equal on all ranks."""
    if state:
        torch.save(state, os.path.join(folder, LEARNED))


def load_learned(folder: str, device: torch.device) -> State:
    """Loads the learned state of methods; `{}` if there is none."""
    return _load(os.path.join(folder, LEARNED), device) or {}


def _load(path: str, device: torch.device) -> State | None:
    where = (
        "cpu" if device.type == "cpu" else device
    )  # with several processes it is `cpu:0`, which torch cannot load to
    return torch.load(path, map_location=where, weights_only=True) if os.path.isfile(path) else None
