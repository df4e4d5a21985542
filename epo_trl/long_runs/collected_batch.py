"""Tensors beside a checkpoint's other files: the batch in use inside an RL step, and what methods have learned."""

from __future__ import annotations

import os
from typing import Any

import torch

LEARNED = "learned_by_methods.pt"
# What TRL's `_prepare_inputs` made of a rollout, with our statistics of it. Plain containers of tensors.
State = dict[str, Any]


def _path(folder: str, rank: int) -> str:
    return os.path.join(folder, f"collected_batch_{rank}.pt")


def save_batch(folder: str, rank: int, state: State) -> None:
    """Writes this rank's part of the batch."""
    torch.save(state, _path(folder, rank))


def load_batch(folder: str, rank: int, device: torch.device) -> State | None:
    """Returns this rank's part of the batch, or `None` if the checkpoint was made by fewer ranks."""
    return _load(_path(folder, rank), device)


def save_learned(folder: str, state: State) -> None:
    """Writes what methods have learned, which is equal on all ranks, if there is anything."""
    if state:
        torch.save(state, os.path.join(folder, LEARNED))


def load_learned(folder: str, device: torch.device) -> State:
    """Returns what methods have learned, `{}` if there is nothing."""
    return _load(os.path.join(folder, LEARNED), device) or {}


def _load(path: str, device: torch.device) -> State | None:
    where = "cpu" if device.type == "cpu" else device  # of several processes `cpu:0`, which torch cannot load to
    return torch.load(path, map_location=where, weights_only=True) if os.path.isfile(path) else None
