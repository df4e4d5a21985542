"""Stands where TRL asks what a model says about rows: shows the model turns, and keeps what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from epo_trl.trainers.turn_forward import nucleus_of_turns, score_turns, value_turns
from epo_trl.trainers.turn_layout import TurnBatch, TurnLayout, cut_turns


@dataclass(frozen=True, slots=True)
class RowScores:
    """What one call of TRL's has found about B rows.

    Args:
        log_probs: (B, T) in nats, 0 where no token was sampled.
        entropy: (B, T) in nats, or `None` if the model was not asked.
        values: (B, T) the critic's, or `None` if it was not asked.
        nucleus_entropy: (B, T) in nats, over the candidates of each token, or `None` without candidates.
        top_p_entropy: (B, T) in nats, over the model's own nucleus, or `None` without `top_p`.
    """

    log_probs: Tensor
    entropy: Tensor | None
    values: Tensor | None
    nucleus_entropy: Tensor | None
    top_p_entropy: Tensor | None


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `over` was given, and the list that it yielded."""

    layout: TurnLayout
    ratio: Callable[[Tensor], Tensor]
    with_values: bool
    candidates: Tensor | None
    top_p: float | None
    found: list[RowScores]


class RowScorer:
    """Scores rows of episodes as turns. It has no rows of its own: `over` says which ones TRL is about to ask for.

    Args:
        autocast: Makes the context of a forward pass.
        buckets: See `score_turns`.
        packed: See `score_turns`.
    """

    def __init__(self, autocast: Callable[[], AbstractContextManager[Any]], *, buckets: int, packed: bool):
        self._autocast = autocast
        self._passes: dict[str, Any] = {"buckets": buckets, "packed": packed}
        self._open: _Asked | None = None

    @contextmanager
    def over(
        self,
        layout: TurnLayout,
        *,
        ratio: Callable[[Tensor], Tensor] = lambda x: x,
        with_values: bool = False,
        candidates: Tensor | None = None,
        top_p: float | None = None,
    ) -> Iterator[list[RowScores]]:
        """Lets TRL ask for rows; what is found is added to the list.

        Args:
            layout: Of the rows.
            ratio: From log-probabilities to those that TRL is given; see `Method.ratio`.
            with_values: Whether the critic's values come from the same forward pass.
            candidates: (B, T, K) token ids, -1 where there is none: what to restrict an entropy to.
            top_p: Of the model's own nucleus, to restrict another entropy to.
        """
        asked = _Asked(layout, ratio, with_values, candidates, top_p, [])
        before, self._open = self._open, asked
        try:
            yield asked.found
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
        """Returns what TRL's `_get_per_token_logps_and_entropies` returns."""
        asked = self._open
        assert asked is not None and asked.layout.turn_ids.shape == (len(input_ids), logits_to_keep)
        model_inputs: dict[str, Any] = {"output_router_logits": True} if compute_aux_loss else {}
        if asked.with_values:
            model_inputs["with_values"] = True
        parts: list[tuple[Tensor | None, ...]] = []
        for rows, turns in _cut(input_ids, asked.layout, batch_size or len(input_ids)):
            own = None if asked.candidates is None else asked.candidates[rows][turns.row, turns.column]
            with self._autocast():
                scores = score_turns(model, turns, **self._passes, candidates=own, top_p=asked.top_p, **model_inputs)
            restricted = (scores.nucleus_entropy, scores.top_p_entropy)
            per_token = (scores.log_probs, scores.entropy, scores.values, *restricted)
            parts.append((*(None if x is None else turns.to_rows(x) for x in per_token), scores.aux_loss))
        log_probs, *others, aux_losses = zip(*parts, strict=True)
        found = RowScores(torch.cat(log_probs), *map(_joined, others))
        asked.found.append(found)
        return (
            asked.ratio(found.log_probs),
            found.entropy if compute_entropy else None,
            torch.stack(aux_losses).mean() if compute_aux_loss else None,
        )

    @torch.no_grad()
    def score_batch(self, model: Any, input_ids: Tensor, attention_mask: Tensor, width: int, size: int) -> RowScores:
        """Returns the scores of rows that TRL has not asked for, in passes over `size` rows. Collective."""
        self(model, input_ids, attention_mask, width, size)
        assert self._open is not None
        return self._open.found[-1]

    def values(self, model: Any, input_ids: Tensor, layout: TurnLayout, size: int) -> Tensor:
        """Returns (B, T) values by the critic, in passes over `size` rows. Collective under ZeRO-3."""
        rows = []
        for _, turns in _cut(input_ids, layout, size):
            with self._autocast():
                rows.append(turns.to_rows(value_turns(model, turns, **self._passes)))
        return torch.cat(rows)

    def nucleus(self, model: Any, input_ids: Tensor, layout: TurnLayout, size: int, cut: float) -> Tensor:
        """Returns (B, T, K) candidates, -1 where there is none, K as small as they allow. Collective under ZeRO-3.

        Args:
            model: Decides what is one.
            input_ids: (B, P + T).
            layout: Of the rows.
            size: Rows of a pass.
            cut: Probability above which a token is a candidate.
        """
        rows = []
        for _, turns in _cut(input_ids, layout, size):
            with self._autocast():
                ids = nucleus_of_turns(model, turns, cut, **self._passes)
            ids = ids[:, (ids >= 0).any(0)]  # the most probable come first
            rows.append(ids.new_full((*turns.shape, ids.shape[1]), -1).index_put((turns.row, turns.column), ids))
        most = max(row.shape[2] for row in rows)
        return torch.cat([pad(row, (0, most - row.shape[2]), value=-1) for row in rows])


def _cut(input_ids: Tensor, layout: TurnLayout, size: int) -> Iterator[tuple[slice, TurnBatch]]:
    """Yields the turns of `size` rows at a time, and which rows those are."""
    for start in range(0, len(input_ids), size):
        rows = slice(start, start + size)
        yield rows, cut_turns(input_ids[rows], layout.rows(start, start + size))


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    return None if parts[0] is None else torch.cat([part for part in parts if part is not None])
