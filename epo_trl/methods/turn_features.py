"""What a frozen model makes of each turn: vectors that stay true however far the policy moves."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TurnFeatures:
    """The last hidden states of the policy at the start of RL, in float32, 0 where there is no turn.

    Args:
        states: (B, K, D) of the text that a turn's response answers: that of its last token.
        actions: (B, K, D) of the response after that text: the mean over its tokens.
        there: (B, K) boolean, where an episode with a signal has a turn.
    """

    states: Tensor
    actions: Tensor
    there: Tensor
