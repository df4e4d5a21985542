"""Scores rows of episodes, each turn as its own sequence, where TRL would score each row as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from epo_trl.devices import to_device
from epo_trl.methods import Need, TokenScores
from epo_trl.objectives.gae import turn_edges
from epo_trl.trainers.scoring.fused_head import mean_discriminator, nucleus_entropy
from epo_trl.trainers.scoring.top_p import own_nucleus_entropy
from epo_trl.trainers.scoring.turn_forward import HeadStatistic, Passes, find_nuclei, score_turns, value_turns
from epo_trl.trainers.scoring.turn_layout import TurnBatch, TurnLayout, cut_turns


@dataclass(frozen=True, slots=True)
class ScoringTask:
    """The rows that TRL scores next, and their scores so far.

    Args:
        layout: Layout of the rows.
        micro_batch: Part of TRL's batch whose loss is computed; `None` when the batch is collected.
        scores: The scores of each call by TRL.
    """

    layout: TurnLayout
    micro_batch: Mapping[str, Any] | None = None
    scores: list[TokenScores] = field(default_factory=list)

    @property
    def candidates(self) -> Tensor | None:
        """(B, T, K) token ids of the reference nucleus, padded with -1; `None` if no entropy over it is needed."""
        return self.micro_batch.get("candidates") if self.micro_batch else None

    @property
    def with_values(self) -> bool:
        """Whether to compute the critic's values in the same forward pass."""
        return self.micro_batch is not None and "old_values" in self.micro_batch


@dataclass(frozen=True)
class RowScorer:
    """Scores rows of episodes turn by turn.

    Args:
        autocast: Factory of the context manager of a forward pass.
        passes: Division of a micro-batch into forward passes.
        top_p: Total probability of the policy's own nucleus, for `Need.TOP_P`; `None` without it.
        discriminator: Whether to compute `Need.DISCRIMINATOR` when a batch is collected.
    """

    autocast: Callable[[], AbstractContextManager[Any]]
    passes: Passes
    top_p: float | None = None
    discriminator: bool = False

    def score(
        self, model: Any, input_ids: Tensor, task: ScoringTask, size: int | None = None, *, with_aux_loss: bool = False
    ) -> tuple[TokenScores, Tensor | None]:
        """Returns the scores of the rows, and the load-balancing loss of a mixture of experts if requested. Collective.

        Args:
            model: A model with TRL's fused LM head.
            input_ids: (B, P + T) token ids.
            task: Layout of the rows, and what to compute.
            size: Number of rows per pass; defaults to all rows.
            with_aux_loss: Whether to compute the load-balancing loss.
        """
        options: dict[str, Any] = {"passes": self.passes}
        if with_aux_loss:
            options["output_router_logits"] = True
        if task.with_values:
            options["with_values"] = True
        parts: list[TokenScores] = []
        aux_losses = []
        for rows, turns in _cut(input_ids, task.layout, size or len(input_ids)):
            statistics = self._statistics(task, rows, turns)
            with self.autocast():
                scores = score_turns(model, turns, statistics=statistics, **options)
            parts.append(
                TokenScores(
                    turns.to_rows(scores.log_probs),
                    turns.to_rows(scores.entropy),
                    {need: turns.to_rows(values) for need, values in scores.head.items()},
                    None if scores.values is None else _one_value(turns.to_rows(scores.values), task.layout, rows),
                )
            )
            if scores.aux_loss is not None:
                aux_losses.append(scores.aux_loss)
        return _joined(parts), torch.stack(aux_losses).mean() if aux_losses else None

    def _statistics(self, task: ScoringTask, rows: slice, turns: TurnBatch) -> Mapping[Need, HeadStatistic]:
        """Returns the requested statistics of the LM head. A new one is one entry here."""
        statistics: dict[Need, HeadStatistic] = {}
        if task.candidates is not None:
            candidates = task.candidates[rows][turns.row, turns.column]
            statistics[Need.NUCLEUS] = lambda head, tokens: nucleus_entropy(head, candidates[tokens])
        if (top_p := self.top_p) is not None:
            statistics[Need.TOP_P] = lambda head, tokens: own_nucleus_entropy(head, top_p)
        if self.discriminator and task.micro_batch is None:
            statistics[Need.DISCRIMINATOR] = lambda head, tokens: mean_discriminator(head)
        return statistics

    def values(self, model: Any, input_ids: Tensor, layout: TurnLayout, size: int) -> Tensor:
        """Returns the critic's (B, T) values, in passes over `size` rows. Collective under ZeRO-3."""
        parts = []
        for rows, turns in _cut(input_ids, layout, size):
            with self.autocast():
                values = value_turns(model, turns, passes=self.passes)
            parts.append(_one_value(turns.to_rows(values), layout, rows))
        return torch.cat(parts)

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
            with self.autocast():
                ids = find_nuclei(model, turns, cut, passes=self.passes)
            ids = ids[:, (ids >= 0).any(0)]  # sorted by probability, so padding is on the right
            rows.append(ids.new_full((*turns.shape, ids.shape[1]), -1).index_put((turns.row, turns.column), ids))
        most = max(row.shape[2] for row in rows)
        return torch.cat([pad(row, (0, most - row.shape[2]), value=-1) for row in rows])


def row_ids(inputs: Mapping[str, Any]) -> Tensor:
    """Returns the (B, P + T) token ids of prompt and completion."""
    return torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)


def _one_value(values: Tensor, layout: TurnLayout, rows: slice) -> Tensor:
    """Returns (b, T) values. Of two heads, the first gives that of a turn's first token, the second the others."""
    if values.dim() == 2:
        return values
    part = layout.rows(rows.start, rows.stop)
    first, _ = turn_edges(part.turn_ids, part.sampled)
    return torch.where(to_device(first, values.device), values[..., 0], values[..., 1])


def _cut(input_ids: Tensor, layout: TurnLayout, size: int) -> Iterator[tuple[slice, TurnBatch]]:
    """Yields the turns of `size` rows at a time, with the slice of those rows."""
    for start in range(0, len(input_ids), size):
        rows = slice(start, start + size)
        yield rows, cut_turns(input_ids[rows], layout.rows(start, start + size))


def _joined(parts: list[TokenScores]) -> TokenScores:
    first = parts[0]
    return TokenScores(
        torch.cat([part.logps for part in parts]),
        torch.cat([part.entropy for part in parts]),
        {need: torch.cat([part.head[need] for part in parts]) for need in first.head},
        None if first.values is None else torch.cat([part.values for part in parts if part.values is not None]),
    )
