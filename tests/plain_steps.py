"""The policy gradient of one update in plain loops: a forward pass for each turn, without batches and padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trainer_kit import (
    catch_step,
    difference,
    give_credit,
    largest,
    make_episodes,
    make_model,
    make_trainer,
    with_episodes,
)

from epo_trl.types import Episode

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Token:
    """A sampled token of `make_episodes()`.

    Args:
        row: Index of its episode.
        turn: Index of its turn.
        log_p: (V,) log-probabilities at its position, with gradient.
        logp: Its own.
    """

    row: int
    turn: int
    log_p: Tensor
    logp: Tensor

    @property
    def advantage(self) -> float:
        """Alternating over the episodes: 1, -2, 3, ..."""
        return (-1.0) ** self.row * (self.row + 1)

    @property
    def entropy(self) -> float:
        return -float((self.log_p.exp() * self.log_p).sum().detach())


def plain_tokens(model: Any, context: str, episodes: Sequence[Episode] | None = None) -> list[Token]:
    """Returns the sampled tokens of all episodes that carry a signal."""
    return [
        token
        for row, episode in enumerate(episodes or make_episodes())
        if episode.is_usable
        for token in _tokens(model, row, episode, context)
    ]


def _tokens(model: Any, row: int, episode: Episode, context: str) -> Iterator[Token]:
    past: list[int] = []
    for k, turn in enumerate(episode.turns):
        ids = [*(past if context == "concatenated" else []), *turn.prompt_ids, *turn.response_ids]
        log_p = (model(torch.tensor([ids])).logits[0, :-1] / TEMPERATURE).log_softmax(-1)[-len(turn.response_ids) :]
        for at, token in zip(log_p, turn.response_ids, strict=True):
            yield Token(row, k, at, at[token])
        past = ids


def step_of(folder: Any, context: str, micro_batches: int, **changes: Any) -> dict[str, Tensor]:
    """Returns the gradients of a trainer in float64 whose credit is `Token.advantage`."""
    trainer = make_trainer(
        folder, model=make_model().double(), context=context, temperature=TEMPERATURE, epo_lambda=0.0,
        per_device_train_batch_size=8 // micro_batches, gradient_accumulation_steps=micro_batches, **changes,
    )  # fmt: skip
    with_episodes(trainer)
    rows = torch.arange(8, dtype=torch.float64)
    give_credit(trainer, lambda batch: ((-1) ** rows * (rows + 1))[:, None] * batch.mask)
    return catch_step(trainer)[1]


def assert_gradient(got: dict[str, Tensor], model: Any, loss: Tensor) -> None:
    """Checks gradients against those of a loss of `plain_tokens`."""
    loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    assert largest(wanted) > 1e-3 and difference(wanted, got) < 1e-6 * largest(wanted)
