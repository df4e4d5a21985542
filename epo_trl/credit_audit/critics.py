"""The values that the critic of a PPO run gives to recorded episodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epo_trl.errors import InputError
from epo_trl.methods import CriticValues
from epo_trl.models.critic import attach_critic
from epo_trl.rollout import ContextBuilder
from epo_trl.trainers.critic.file import CRITIC_FILE, load_critic
from epo_trl.trainers.critic.setup import copy_of_policy, make_critic
from epo_trl.trainers.ppo_config import EPOPPOConfig
from epo_trl.types import Episode

_SEQUENCES = 64  # in one forward pass


class SavedCritic:
    """The critic of a run, as a function from episodes to values.

    A turn limit ends an episode in an audit, so the state after the last turn has value 0, also where the run
    bootstraps.

    Args:
        folder: Folder with the weights of policy and critic.
        model: The policy. The critic is attached to it.
        tokenizer: Tokenizer of the policy.
        args: Configuration of the run.
        context: Builder of the prompts.
    """

    def __init__(self, folder: str, model: Any, tokenizer: Any, args: EPOPPOConfig, context: ContextBuilder) -> None:
        path = Path(folder) / CRITIC_FILE
        if not path.is_file():
            raise InputError(f"RUN: expected a folder with {CRITIC_FILE} for algorithm 'ppo', got {folder}")
        critic = make_critic(model, args, tokenizer, backbone=copy_of_policy(model, args)).to(model.device)
        load_critic(str(path), critic)
        attach_critic(model, critic.eval())
        self._model, self._context = model, context

    def __call__(self, episodes: Sequence[Episode]) -> CriticValues:
        """Returns the values of the response tokens, padded to (B, T)."""
        rows = [self._of_turns(episode) for episode in episodes]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return CriticValues(tokens, torch.zeros(len(episodes)))

    def _of_turns(self, episode: Episode) -> Tensor:
        """Returns (T,) values before each response token of an episode."""
        sequences: list[list[int]] = []
        places: list[tuple[int, int, int]] = []  # sequence, index of the token before the response, response length
        for turn in episode.turns:
            if not sequences or self._context.is_windowed:
                sequences.append([])
            sequences[-1] += turn.prompt_ids
            places.append((len(sequences) - 1, len(sequences[-1]) - 1, len(turn.response_ids)))
            sequences[-1] += turn.response_ids
        values = [
            row for first in range(0, len(sequences), _SEQUENCES) for row in self._score(sequences[first:][:_SEQUENCES])
        ]
        return torch.cat([values[row][before : before + count] for row, before, count in places])

    @torch.inference_mode()
    def _score(self, sequences: Sequence[list[int]]) -> list[Tensor]:
        width = max(map(len, sequences))
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in sequences], device=self._model.device)
        return list(self._model(input_ids=ids, values_only=True).state_values.float().cpu())
