"""Evaluates the saved critics of a run on recorded episodes: PPO's, and ArCHer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from epo_trl.errors import InputError
from epo_trl.methods import CriticValues, TurnFeatures
from epo_trl.methods.archer import ArCHer
from epo_trl.models.adapters import Adapter
from epo_trl.models.critic import (
    CRITIC_FILE,
    attach_critic,
    causal_lm,
    copy_of_policy,
    load_critic,
    loaded_backbone,
    make_critic,
)
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
        if not path.is_file():
            raise InputError(f"RUN: expected a folder with {CRITIC_FILE} for algorithm 'ppo', got {folder}")
        with safetensors.safe_open(path, "pt") as file:
            self.has_two_heads = "token_head.weight" in file.keys()  # noqa: SIM118 - it is no mapping
        parts = _on_its_base(folder, model, args) if args.critic_use_peft else {"backbone": copy_of_policy(model, args)}
        critic = make_critic(model, args, token_head=self.has_two_heads, **parts).to(model.device)
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
        """Returns (T,) values before each response token of an episode."""
        forward = lambda ids: self._model(input_ids=ids, values_only=True).state_values  # noqa: E731
        found = _at_turns(episode, self._context, self._model.device, forward)
        # Of two heads, the first gives the value of a turn's first token.
        rows = [torch.cat([one[:1, 0], one[1:-1, 1]]) if self.has_two_heads else one[:-1] for one in found]
        return torch.cat(rows) if rows else torch.zeros(0)


def _on_its_base(folder: str, model: Any, args: EPOPPOConfig) -> dict[str, Any]:
    """Returns backbone and adapter configuration of a critic that is an adapter on the base of the policy's."""
    from peft import PeftConfig

    adapter = Adapter.find(folder)
    if adapter is None:
        raise InputError(f"critic_use_peft: expected False for a run without an adapter, got True for {folder}")
    peft_config = PeftConfig.from_pretrained(folder)
    peft_config.inference_mode = False  # the critic's file has what was trained
    backbone = adapter.load_base(loaded_backbone, policy=model, trust_remote_code=args.trust_remote_code)
    return {"backbone": backbone, "peft_config": peft_config}


class ReferenceFeatures:
    """Hidden states of recorded turns under the reference policy, the model that the run started from.

    ArCHer's critics read them.
    """

    def __init__(self, model: Any, context: ContextBuilder) -> None:
        self._backbone, self._device, self._context = causal_lm(model).base_model, model.device, context

    @torch.inference_mode()
    def __call__(self, episodes: Sequence[Episode]) -> TurnFeatures:
        """Returns the features of the turns of B episodes."""
        rows = [self._of_turns(episode) for episode in episodes]
        states, actions = (torch.nn.utils.rnn.pad_sequence([row[part] for row in rows], True) for part in (0, 1))
        there = torch.arange(states.shape[1]) < torch.tensor([[len(row[0])] for row in rows])
        return TurnFeatures(states, actions, there)

    def _of_turns(self, episode: Episode) -> tuple[Tensor, Tensor]:
        """Returns (K, D) states and actions of an episode."""
        forward = lambda ids: self._backbone(input_ids=ids, use_cache=False).last_hidden_state  # noqa: E731
        found = _at_turns(episode, self._context, self._device, forward)
        if not found:
            return (torch.zeros(0, self._backbone.config.get_text_config().hidden_size),) * 2
        return torch.stack([one[0] for one in found]), torch.stack([one[1:].mean(0) for one in found])


class SavedArCHer(ArCHer):
    """ArCHer with the critics of a checkpoint, which do not learn from the batch."""

    def _learn(self, batch: Any) -> tuple[float, float]:
        return 0.0, 0.0


def load_archer(path: Path, settings: dict[str, Any]) -> SavedArCHer:
    """Returns ArCHer's credit with the critics of a checkpoint, from the file of what its methods have learned."""
    learned = torch.load(path, map_location="cpu", weights_only=True)
    if "archer" not in learned:
        raise InputError(f"RUN: expected the critics of archer in {path}, got {sorted(learned)}")
    method = SavedArCHer(**{**settings, "warmup_rl_steps": 0})
    method.load_state_dict(learned["archer"])
    return method


def _at_turns(
    episode: Episode, context: ContextBuilder, device: torch.device, forward: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Returns what `forward` computes from the last prompt token to the last response token of each turn.

    A turn is a sequence of its own in windowed context; the padding is on the right, where no token sees it.
    """
    sequences: list[list[int]] = []
    places: list[tuple[int, int, int]] = []  # sequence, index of the token before the response, length of the sequence
    for turn in episode.turns:
        if not sequences or context.is_windowed:
            sequences.append([])
        sequences[-1] += turn.prompt_ids
        first = len(sequences[-1]) - 1
        sequences[-1] += turn.response_ids
        places.append((len(sequences) - 1, first, len(sequences[-1])))
    found: list[Tensor] = []
    for start in range(0, len(sequences), _SEQUENCES):
        part = sequences[start : start + _SEQUENCES]
        width = max(map(len, part))
        ids = torch.tensor([each + [0] * (width - len(each)) for each in part], device=device)
        found += forward(ids).float().cpu()
    return [found[row][first:end] for row, first, end in places]
