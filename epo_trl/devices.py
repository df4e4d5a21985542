"""Device copies and random states on any device: CUDA and ROCm, XPU, NPU, MPS or CPU. Memory that a CPU run frees."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to the device without waiting for the GPU's earlier work.

    CUDA copies asynchronously only from pinned memory. torch keeps that memory until the copy has ended, so the source
    may be changed or freed at once.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seeds the random generators of the CPU and the device inside the block and restores their state afterwards.

    Unlike `torch.manual_seed`, this seeds no other device.
    """
    others = [device] if device is not None and device.type != "cpu" else []
    with torch.random.fork_rng(others, device_type=others[0].type if others else "cuda"):
        torch.default_generator.manual_seed(seed)
        for other in others:
            torch.get_device_module(other).manual_seed(seed)
        yield


def return_freed_memory(device: torch.device) -> None:
    """Returns the free parts of glibc's heap to the system; does nothing on a GPU, or with another C library.

    The caches of a rollout and the activations of an update leave holes of different sizes between them. Without this
    call, a run on a CPU grows to about twice what it uses.
    """
    if device.type != "cpu":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
