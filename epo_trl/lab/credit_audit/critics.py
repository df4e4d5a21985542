"""Evaluates the saved critic of a PPO run on recorded episodes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import safetensors
import torch
from trl.trainer.utils import pad

from epo_trl.methods import Comm, CriticValues, Methods
from epo_trl.models.critic import CRITIC_FILE, attach_critic, copy_of_policy, load_critic, make_critic
from epo_trl.rollout import ContextBuilder
from epo_trl.scoring.row_scorer import RowScorer
from epo_trl.scoring.turn_forward import Passes
from epo_trl.trainers.ppo_config import EPOPPOConfig
from epo_trl.trainers.step import RLStep
from epo_trl.types import Episode

_PASSES = Passes(tokens=16384)


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
        self._scorer = RowScorer(nullcontext, _PASSES, _PASSES, 1, Methods({}, 1))

    @torch.inference_mode()
    def __call__(self, episodes: Sequence[Episode]) -> CriticValues:
        """Returns the values of the response tokens, padded to (B, T)."""
        step = RLStep.lay_out([*episodes], self._context, 1, Comm(), placeholder_id=0, multiple=None)
        prompts = pad([torch.tensor(row.prompt_ids) for row in step.rows], padding_value=0, padding_side="left")
        completions = pad([torch.tensor(row.completion_ids) for row in step.rows], padding_value=0)
        ids = torch.cat([prompts, completions], 1).to(self._model.device)
        values = self._scorer.values(self._model, ids, step.layout).cpu()
        rows = [row[sampled] for row, sampled in zip(values, step.layout.sampled, strict=True)]
        return CriticValues(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.zeros(len(episodes)))
