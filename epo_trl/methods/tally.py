"""Sums that a method accumulates during an RL step, for its metrics."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from epo_trl.methods.base import Comm, Method


class Tally:
    """Accumulates named sums over an RL step. Those of a `Tallied` method are saved in checkpoints.

    Args:
        *names: Names of the sums.
    """

    def __init__(self, *names: str):
        self._names = names
        self._sums = torch.zeros(len(names), dtype=torch.float64)

    def add(self, **values: float | Tensor) -> None:
        """Adds a number or a one-element tensor to each of the sums, on the device of the first tensor."""
        device = next((value.device for value in values.values() if isinstance(value, Tensor)), None)
        added = torch.stack([torch.as_tensor(values[name], dtype=torch.float64, device=device) for name in self._names])
        self._sums = self._sums.to(added.device) + added.detach()

    def take(self, ranks: Comm) -> dict[str, float]:
        """Returns the sums over all ranks by name, and resets them. Collective."""
        sums = ranks.sum(self._sums).tolist()
        self._sums = torch.zeros_like(self._sums)
        return dict(zip(self._names, sums, strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the sums so far."""
        return {"sums": self._sums}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replaces the sums with saved ones."""
        self._sums = state["sums"].cpu()


class Tallied(Method):
    """A method with a tally that is saved in checkpoints within an RL step. List it before other base classes.

    Attributes:
        tally: Sums of the RL step, created in `__post_init__`.
    """

    tally: Tally

    def batch_state(self) -> dict[str, Tensor]:
        """Returns the sums so far."""
        return self.tally.state_dict()

    def load_batch_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores the sums."""
        self.tally.load_state_dict(state)
