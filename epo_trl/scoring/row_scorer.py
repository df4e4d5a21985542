"""Scores rows of episodes, each turn as its own sequence, where TRL would score each row as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor

from epo_trl.devices import to_device
from epo_trl.methods import Methods, TokenScores, TurnFeatures
from epo_trl.methods.base import Statistic
from epo_trl.methods.stack import Annotations, MarkedStatistic
from epo_trl.models.critic import causal_lm
from epo_trl.objectives.gae import turn_edges
from epo_trl.scoring.reference import last_hidden_states, turn_features
from epo_trl.scoring.turn_forward import HeadStatistic, Passes, score_turns, value_turns
from epo_trl.scoring.turn_layout import TurnBatch, TurnLayout, cut_turns


@dataclass(frozen=True)
class RowScorer:
    """Scores rows of episodes turn by turn."""

    autocast: Callable[[], AbstractContextManager[Any]]  # of a forward pass
    passes: Passes  # of a micro-batch, with gradient
    without_gradient: Passes  # of a batch
    rows: int  # of a micro-batch
    methods: Methods  # with their statistics of the LM head

    def score(
        self,
        model: Any,
        input_ids: Tensor,
        layout: TurnLayout,
        *,
        annotations: Annotations | None = None,
        with_values: bool = False,
        with_aux_loss: bool = False,
    ) -> tuple[TokenScores, Tensor | None]:
        """Returns the scores of the rows, and the load-balancing loss of a mixture of experts if requested. Collective.

        Args:
            model: A model with TRL's fused LM head.
            input_ids: (B, P + T) token ids.
            layout: Layout of the rows.
            annotations: Token annotations of the rows, in the loss; `None` when a batch is collected.
            with_values: Whether to compute the critic's values in the same forward pass.
            with_aux_loss: Whether to compute the load-balancing loss.
        """
        options: dict[str, Any] = {"passes": self.passes if torch.is_grad_enabled() else self.without_gradient}
        if with_aux_loss:
            options["output_router_logits"] = True
        if with_values:
            options["with_values"] = True
        statistics = self.methods.head_statistics(
            "statistics" if annotations is None else "loss_statistics", annotations
        )
        turns = cut_turns(input_ids, layout)
        with self.autocast():
            found = score_turns(model, turns, statistics=_at_tokens(statistics, turns), **options)
        scores = TokenScores(
            turns.to_rows(found.log_probs),
            turns.to_rows(found.entropy),
            {name: turns.to_rows(values) for name, values in found.statistics.items()},
            None if found.values is None else _one_value(turns.to_rows(found.values), layout),
        )
        return scores, found.aux_loss

    def values(self, model: Any, input_ids: Tensor, layout: TurnLayout) -> Tensor:
        """Returns the critic's (B, T) values. Collective under ZeRO-3."""
        turns = cut_turns(input_ids, layout)
        with self.autocast():
            values = value_turns(model, turns, passes=self.without_gradient)
        return _one_value(turns.to_rows(values), layout)

    @torch.no_grad()
    def reference(self, model: Any, input_ids: Tensor, layout: TurnLayout) -> dict[str, Tensor]:
        """Returns the methods' (B, T, ...) statistics of the reference policy. Collective under ZeRO-3.

        Integers are token ids, (B, T, K), padded with -1 and with the smallest possible K.
        """
        turns = cut_turns(input_ids, layout)
        statistics = _at_tokens(self.methods.head_statistics("reference_statistics"), turns)
        with self.autocast():
            found = score_turns(model, turns, statistics=statistics, passes=self.without_gradient).statistics
        return {
            name: turns.to_rows(values)
            if values.is_floating_point()
            else turns.to_rows(values[:, (values >= 0).any(0)], -1)
            for name, values in found.items()
        }

    def features(self, model: Any, input_ids: Tensor, layout: TurnLayout) -> TurnFeatures:
        """Returns the hidden states of the turns of the rows under a model. Collective under ZeRO-3."""
        turns, parts = int(layout.turn_ids.max()) + 1, []
        backbone = causal_lm(extract_model_from_parallel(model)).base_model
        for start in range(0, len(input_ids), self.rows):
            some = slice(start, start + self.rows)
            rows = layout.rows(some)
            cut = cut_turns(input_ids[some], rows)
            with self.autocast():
                hidden = last_hidden_states(model, backbone, cut.input_ids)
            parts.append(turn_features(hidden, cut, rows, turns))
        return TurnFeatures(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _at_tokens(statistics: Mapping[str, MarkedStatistic], turns: TurnBatch) -> dict[str, HeadStatistic]:
    """Returns the statistics as functions of the head's input at some sampled tokens and of the tokens' indices."""

    def at_tokens(compute: Statistic, marks: Mapping[str, Tensor]) -> HeadStatistic:
        marks = {name: values[turns.row, turns.column] for name, values in marks.items()}
        return lambda head, tokens: compute(head, {name: values[tokens] for name, values in marks.items()})

    return {name: at_tokens(*statistic) for name, statistic in statistics.items()}


def _one_value(values: Tensor, layout: TurnLayout) -> Tensor:
    """Returns (B, T) values. Of two heads, the first gives that of a turn's first token, the second the others."""
    if values.dim() == 2:
        return values
    first, _ = turn_edges(layout.turn_ids, layout.sampled)
    return torch.where(to_device(first, values.device), values[..., 0], values[..., 1])
