"""From one advantage per episode to one per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from epo_trl.types import Episode


@dataclass(frozen=True, slots=True)
class CreditBatch:
    """What a credit assignment may look at.

    Args:
        episodes: B episodes, the local ones.
        episode_advantages: (B,) group-relative advantage of each episode's total reward, 0 for aborted episodes.
        turn_ids: (B, T) turn of each completion token, -1 on padding.
        response_mask: (B, T), 1 on sampled tokens.
    """

    episodes: Sequence[Episode]
    episode_advantages: Tensor
    turn_ids: Tensor
    response_mask: Tensor


def share_episode_advantage(batch: CreditBatch) -> Tensor:
    """Returns (B, T) advantages: every token of an episode gets the episode's (GRPO, arXiv 2402.03300)."""
    return batch.episode_advantages.unsqueeze(1) * batch.response_mask
