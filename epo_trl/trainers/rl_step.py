"""The batch of one RL step: its episodes, and how TRL and the methods see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import pad

from epo_trl.methods import Comm
from epo_trl.rollout import ContextBuilder, episode_to_row
from epo_trl.rollout.rows import Row
from epo_trl.trainers.collection import Collected
from epo_trl.trainers.scoring.turn_layout import TurnLayout
from epo_trl.types import Episode


@dataclass(frozen=True, slots=True)
class RLStep:
    """The batch that this rank has collected for an RL step.

    TRL's own batch is a dict of tensors, which TRL shuffles and splits into micro-batches. Everything else stays here.

    Args:
        collected: The episodes, and those of discarded groups.
        rows: One row of TRL's batch per episode.
        layout: Turns of the rows.
    """

    collected: Collected
    rows: Sequence[Row]
    layout: TurnLayout

    @classmethod
    def lay_out(
        cls, collected: Collected, context: ContextBuilder, placeholder_id: int, multiple: int | None
    ) -> RLStep:
        """Lays out episodes as rows, padded as TRL pads its completions.

        Args:
            collected: The episodes.
            context: Context of the rollout.
            placeholder_id: Any valid token id, for episodes without a learning signal.
            multiple: Length of which the padded length is a multiple.
        """
        rows = [episode_to_row(episode, placeholder_id) for episode in collected.episodes]
        layout = TurnLayout(
            _padded([row.turn_ids for row in rows], -1, multiple),
            _padded([row.env_mask for row in rows], 0, multiple),
            torch.tensor([len(row.prompt_ids) for row in rows]),
            windowed=context.is_windowed,
        )
        return cls(collected, rows, layout)

    @property
    def episodes(self) -> list[Episode]:
        """One episode per row, with the rewards assigned by the methods."""
        return self.collected.episodes

    @property
    def turn_rewards(self) -> Tensor:
        """(B, K) rewards of the turns, 0 beyond an episode's last turn and for episodes without a learning signal."""
        rewards = [[turn.reward for turn in episode.turns] * episode.is_usable for episode in self.episodes]
        width = max(1, *map(len, rewards))
        return torch.tensor([row + [0.0] * (width - len(row)) for row in rewards])

    def to_rollout_output(self, ranks: Comm) -> dict[str, Any]:
        """Returns the batch in the format of TRL's `rollout_func`. Extra fields reach the reward functions, row by row.

        Collective: if any rank has log-probabilities, a rank whose episodes were all aborted returns them too.
        """
        rows = self.rows
        has_logprobs = any(ranks.gather([any(row.logprobs is not None for row in rows)]))
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.completion_ids for row in rows],
            "env_mask": [row.env_mask for row in rows],
            "logprobs": [row.logprobs or [0.0] * len(row.completion_ids) for row in rows] if has_logprobs else None,
            "episode_return": [episode.total_reward for episode in self.episodes],
            "episode": list(self.episodes),
        }


def _padded(lists: Sequence[list[int]], value: int, multiple: int | None) -> Tensor:
    tensors = [torch.tensor(row) for row in lists]
    return pad(tensors, padding_value=value, padding_side="right", pad_to_multiple_of=multiple)
