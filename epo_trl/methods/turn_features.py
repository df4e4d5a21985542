"""Hidden states of each turn under a frozen model: they stay valid however far the policy moves."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TurnFeatures:
    """Last hidden states of the reference policy, in float32, 0 where there is no turn.

    Args:
        states: (B, K, D) state of a turn: the hidden state at the last token before its response.
        actions: (B, K, D) action of a turn: the mean hidden state over the tokens of its response.
        turn_mask: (B, K) boolean, true for the turns of usable episodes.
    """

    states: Tensor
    actions: Tensor
    turn_mask: Tensor
