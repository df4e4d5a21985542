"""The batch in use when a checkpoint falls inside an RL step: one file per rank, beside the checkpoint's others."""

from __future__ import annotations

import os
from typing import Any

import torch

# What TRL's `_prepare_inputs` made of a rollout, with our statistics of it. Plain containers of tensors.
State = dict[str, Any]


def _path(folder: str, rank: int) -> str:
    return os.path.join(folder, f"collected_batch_{rank}.pt")


def save_batch(folder: str, rank: int, state: State) -> None:
    """Writes this rank's part of the batch."""
    torch.save(state, _path(folder, rank))


def load_batch(folder: str, rank: int, device: torch.device) -> State | None:
    """Returns this rank's part of the batch, or `None` if the checkpoint was made by fewer ranks."""
    path = _path(folder, rank)
    where = "cpu" if device.type == "cpu" else device  # of several processes `cpu:0`, which torch cannot load to
    return torch.load(path, map_location=where, weights_only=True) if os.path.isfile(path) else None
