"""The history of past entropies that the smoothing term refers to."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from epo_trl.errors import InputError

GRANULARITIES = ("step", "turn")


class EntropyHistory:
    """W_k of EPO (arXiv 2509.22576, Algorithm 1): one entry per RL step. Its mean is the reference.

    Args:
        per: `"step"` keeps one number per RL step, the token-level mean entropy of the batch (the paper).
            `"turn"` keeps one number per RL step and turn index (the authors' release).
        window: Number of RL steps to look back; `None` uses the whole history (the paper).
    """

    def __init__(self, per: str = "step", window: int | None = None):
        self.per = per
        self.window = window
        self._entries: deque[dict[int, float]] = deque(maxlen=window)
        self.total_appended = 0

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, entropy: float | Mapping[int, float]) -> None:
        """Adds the mean entropy of one RL step, in nats.

        Args:
            entropy: A number for `per="step"`, a mapping from turn index to number for `per="turn"`.

        Raises:
            TypeError: If the type of the value does not fit `per`.
            ValueError: If a value is negative or not finite, or a turn index is negative.
        """
        if isinstance(entropy, Mapping) != (self.per == "turn"):
            expected = "a mapping from turn index to entropy" if self.per == "turn" else "a number"
            raise TypeError(f"entropy: expected {expected} with per={self.per!r}, got {entropy!r}")
        self._entries.append(_checked(entropy if isinstance(entropy, Mapping) else {0: entropy}))
        self.total_appended += 1

    def reference(self, turn_ids: Tensor | None = None) -> Tensor | float | None:
        """Returns the mean over the window, in nats.

        Args:
            turn_ids: Integers of any shape; needed for `per="turn"`, ignored otherwise.

        Returns:
            `per="step"`: a float, or `None` while the window is empty. `per="turn"`: a float32 tensor shaped like
            `turn_ids`, NaN where that turn index has no history.
        """
        if self.per == "step":
            return sum(e[0] for e in self._entries) / len(self._entries) if self._entries else None
        if turn_ids is None:
            raise InputError("turn_ids: expected the turn index of each token with per='turn', got None")
        values: dict[int, list[float]] = {}
        for entry in self._entries:
            for turn, value in entry.items():
                values.setdefault(turn, []).append(value)
        table = torch.full((max(values, default=0) + 2,), float("nan"), device=turn_ids.device)
        for turn, entropies in values.items():
            table[turn] = sum(entropies) / len(entropies)
        last = table.numel() - 1  # stays NaN: padding and unseen turns
        return table[torch.where(turn_ids < 0, last, turn_ids.clamp(max=last)).long()]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for `load_state_dict`, as plain JSON types."""
        entries = [{str(turn): value for turn, value in entry.items()} for entry in self._entries]
        return {"per": self.per, "window": self.window, "entries": entries, "total_appended": self.total_appended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the history with a saved one.

        Raises:
            ValueError: If the saved history has another `per` or `window`.
        """
        for name in ("per", "window"):
            if state[name] != getattr(self, name):
                mine, saved = getattr(self, name), state[name]
                raise InputError(f"entropy history: expected {name}={mine!r}, got {saved!r} in the saved state")
        self._entries = deque([_checked(entry) for entry in state["entries"]], maxlen=self.window)
        self.total_appended = int(state["total_appended"])


def _checked(entry: Mapping[Any, Any]) -> dict[int, float]:
    checked = {int(turn): float(value) for turn, value in entry.items()}
    for turn, value in checked.items():
        if turn < 0:
            raise InputError(f"entropy: expected turn indices >= 0, got {turn}")
        if not 0.0 <= value < float("inf"):
            raise InputError(f"entropy: expected a finite number >= 0 (nats), got {value}")
    return checked
