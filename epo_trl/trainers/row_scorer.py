"""Replaces TRL's log-prob computation: scores each turn as its own sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from epo_trl.trainers.turn_forward import find_nuclei, score_turns, value_turns
from epo_trl.trainers.turn_layout import TurnBatch, TurnLayout, cut_turns


@dataclass(frozen=True, slots=True)
class RowScores:
    """Scores of B rows, from one call by TRL.

    Args:
        log_probs: (B, T) log-probabilities in nats, 0 where no token was sampled.
        entropy: (B, T) entropies in nats, or `None` if the model returned none.
        values: (B, T) values of the critic, or `None` if they were not requested.
        nucleus_entropy: (B, T) entropies in nats over the candidates of each token, or `None` without candidates.
        top_p_entropy: (B, T) entropies in nats over the model's own nucleus, or `None` without `top_p`.
    """

    log_probs: Tensor
    entropy: Tensor | None
    values: Tensor | None
    nucleus_entropy: Tensor | None
    top_p_entropy: Tensor | None


@dataclass(frozen=True, slots=True)
class _ScoreRequest:
    """The arguments of `expect_rows`, and the list that it yielded."""

    layout: TurnLayout
    ratio: Callable[[Tensor], Tensor]
    with_values: bool
    candidates: Tensor | None
    top_p: float | None
    scores: list[RowScores]


class RowScorer:
    """Scores rows of episodes turn by turn. `expect_rows` sets the layout of the rows that TRL is about to score.

    Args:
        autocast: Factory of the context manager of a forward pass.
        buckets: See `score_turns`.
        packed: See `score_turns`.
    """

    def __init__(self, autocast: Callable[[], AbstractContextManager[Any]], *, buckets: int, packed: bool):
        self._autocast = autocast
        self._passes: dict[str, Any] = {"buckets": buckets, "packed": packed}
        self._open: _ScoreRequest | None = None

    @contextmanager
    def expect_rows(
        self,
        layout: TurnLayout,
        *,
        ratio: Callable[[Tensor], Tensor] = lambda x: x,
        with_values: bool = False,
        candidates: Tensor | None = None,
        top_p: float | None = None,
    ) -> Iterator[list[RowScores]]:
        """Sets the layout for TRL's calls within the block; each call appends its scores to the yielded list.

        Args:
            layout: Layout of the rows.
            ratio: Maps log-probabilities to those returned to TRL; see `Method.ratio`.
            with_values: Whether to compute the critic's values in the same forward pass.
            candidates: (B, T, K) token ids over which an entropy is computed, padded with -1.
            top_p: Total probability of the model's own nucleus, over which another entropy is computed.
        """
        request = _ScoreRequest(layout, ratio, with_values, candidates, top_p, [])
        before, self._open = self._open, request
        try:
            yield request.scores
        finally:
            self._open = before

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the outputs of TRL's `_get_per_token_logps_and_entropies`."""
        request = self._open
        assert request is not None and request.layout.turn_ids.shape == (len(input_ids), logits_to_keep)
        model_inputs: dict[str, Any] = {"output_router_logits": True} if compute_aux_loss else {}
        if request.with_values:
            model_inputs["with_values"] = True
        parts: list[tuple[Tensor | None, ...]] = []
        for rows, turns in _cut(input_ids, request.layout, batch_size or len(input_ids)):
            own = None if request.candidates is None else request.candidates[rows][turns.row, turns.column]
            with self._autocast():
                scores = score_turns(model, turns, **self._passes, candidates=own, top_p=request.top_p, **model_inputs)
            restricted = (scores.nucleus_entropy, scores.top_p_entropy)
            per_token = (scores.log_probs, scores.entropy, scores.values, *restricted)
            parts.append((*(None if x is None else turns.to_rows(x) for x in per_token), scores.aux_loss))
        log_probs, *others, aux_losses = zip(*parts, strict=True)
        row_scores = RowScores(torch.cat(log_probs), *map(_joined, others))
        request.scores.append(row_scores)
        return (
            request.ratio(row_scores.log_probs),
            row_scores.entropy if compute_entropy else None,
            torch.stack(aux_losses).mean() if compute_aux_loss else None,
        )

    @torch.no_grad()
    def score_batch(self, model: Any, input_ids: Tensor, attention_mask: Tensor, width: int, size: int) -> RowScores:
        """Scores rows that TRL has not requested, in passes over `size` rows. Collective."""
        self(model, input_ids, attention_mask, width, size)
        assert self._open is not None
        return self._open.scores[-1]

    def values(self, model: Any, input_ids: Tensor, layout: TurnLayout, size: int) -> Tensor:
        """Returns the critic's (B, T) values, in passes over `size` rows. Collective under ZeRO-3."""
        rows = []
        for _, turns in _cut(input_ids, layout, size):
            with self._autocast():
                rows.append(turns.to_rows(value_turns(model, turns, **self._passes)))
        return torch.cat(rows)

    def nucleus(self, model: Any, input_ids: Tensor, layout: TurnLayout, size: int, cut: float) -> Tensor:
        """Returns (B, T, K) candidates, padded with -1, with the smallest possible K. Collective under ZeRO-3.

        Args:
            model: Model whose probabilities select the candidates.
            input_ids: (B, P + T) token ids.
            layout: Layout of the rows.
            size: Number of rows per pass.
            cut: Probability above which a token is a candidate.
        """
        rows = []
        for _, turns in _cut(input_ids, layout, size):
            with self._autocast():
                ids = find_nuclei(model, turns, cut, **self._passes)
            ids = ids[:, (ids >= 0).any(0)]  # sorted by probability, so padding is on the right
            rows.append(ids.new_full((*turns.shape, ids.shape[1]), -1).index_put((turns.row, turns.column), ids))
        most = max(row.shape[2] for row in rows)
        return torch.cat([pad(row, (0, most - row.shape[2]), value=-1) for row in rows])


def _cut(input_ids: Tensor, layout: TurnLayout, size: int) -> Iterator[tuple[slice, TurnBatch]]:
    """Yields the turns of `size` rows at a time, with the slice of those rows."""
    for start in range(0, len(input_ids), size):
        rows = slice(start, start + size)
        yield rows, cut_turns(input_ids[rows], layout.rows(start, start + size))


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    return None if parts[0] is None else torch.cat([part for part in parts if part is not None])
