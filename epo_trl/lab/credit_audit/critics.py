"""Evaluates the saved critic of a PPO run on recorded episodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from epo_trl.methods import CriticValues
from epo_trl.models.critic import CRITIC_FILE, attach_critic, copy_of_policy, load_critic, make_critic
from epo_trl.rollout import ContextBuilder
from epo_trl.trainers.ppo_config import EPOPPOConfig
from epo_trl.types import Episode

_SEQUENCES = 64  # in one forward pass


class SavedCritic:
    """The critic of a run, as a function from episodes to values.

    `has_two_heads` is whether it has a second head, whose values are those of a turn's tokens but the first.

    A turn limit ends an episode in an audit, so the state after the last turn has value 0, also where the run
    bootstraps. The critic is attached to `model`, the policy; `folder` has the weights of both.
    """

    def __init__(self, folder: str, model: Any, args: EPOPPOConfig, context: ContextBuilder) -> None:
        path = Path(folder) / CRITIC_FILE
        with safetensors.safe_open(path, "pt") as file:
            self.has_two_heads = "token_head.weight" in file.keys()  # noqa: SIM118 - it is no mapping
        backbone = copy_of_policy(model, args)
        critic = make_critic(model, args, backbone=backbone, token_head=self.has_two_heads).to(model.device)
        load_critic(str(path), critic)
        attach_critic(model, critic.eval())
        self._model, self._context = model, context

    @torch.inference_mode()
    def __call__(self, episodes: Sequence[Episode]) -> CriticValues:
        """Returns the values of the response tokens, padded to (B, T)."""
        rows = [self._of_turns(episode) for episode in episodes]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return CriticValues(tokens, torch.zeros(len(episodes)))

    def _of_turns(self, episode: Episode) -> Tensor:
        """Returns (T,) values before each response token of an episode.

        A turn is a sequence of its own in windowed context; the padding is on the right, where no token sees it.
        """
        sequences: list[list[int]] = []
        places: list[tuple[int, int, int]] = []  # sequence, last token before the response, length of the sequence
        for turn in episode.turns:
            if not sequences or self._context.is_windowed:
                sequences.append([])
            sequences[-1] += turn.prompt_ids
            first = len(sequences[-1]) - 1
            sequences[-1] += turn.response_ids
            places.append((len(sequences) - 1, first, len(sequences[-1])))
        values: list[Tensor] = []
        for start in range(0, len(sequences), _SEQUENCES):
            part = sequences[start : start + _SEQUENCES]
            width = max(map(len, part))
            ids = torch.tensor([each + [0] * (width - len(each)) for each in part], device=self._model.device)
            values += self._model(input_ids=ids, values_only=True).state_values.float().cpu()
        found = [values[row][first:end] for row, first, end in places]
        # Of two heads, the first gives the value of a turn's first token.
        rows = [torch.cat([one[:1, 0], one[1:-1, 1]]) if self.has_two_heads else one[:-1] for one in found]
        return torch.cat(rows) if rows else torch.zeros(0)
