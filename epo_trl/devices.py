"""Copies and random states on whatever device there is: CUDA and ROCm, XPU, NPU, MPS, or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a CPU tensor on the device; a GPU's earlier work is not waited for.

    CUDA copies in the background from pinned memory alone. torch keeps that memory until the copy has ended, so the
    source may change or go at once.

    Args:
        tensor: Tensor on the CPU.
        device: Device of the returned tensor.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Draws random numbers from `seed` inside of the block, and restores the random state after it.

    No other device is seeded, which `torch.manual_seed` would do.

    Args:
        seed: Seed of the CPU's generator, and of the device's.
        device: Device that draws random numbers in the block; `None` if only the CPU does.
    """
    if device is None or device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    with torch.random.fork_rng([device], device_type=device.type):
        torch.default_generator.manual_seed(seed)
        torch.get_device_module(device).manual_seed(seed)
        yield
