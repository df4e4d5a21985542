"""Scores rows of episodes, each turn as its own sequence, where TRL would score each row as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epo_trl.devices import to_device
from epo_trl.methods import Need, TokenScores
from epo_trl.methods.turn_features import TurnFeatures
from epo_trl.objectives.gae import turn_edges
from epo_trl.scoring.fused_head import mean_discriminator, nucleus_entropy
from epo_trl.scoring.reference import extract_features
from epo_trl.scoring.top_p import own_nucleus_entropy
from epo_trl.scoring.turn_forward import HeadStatistic, Passes, find_nuclei, score_turns, value_turns
from epo_trl.scoring.turn_layout import TurnBatch, TurnLayout, cut_turns


@dataclass(frozen=True)
class RowScorer:
    """Scores rows of episodes turn by turn.

    Args:
        autocast: Factory of the context manager of a forward pass.
        passes: Division of a micro-batch into forward passes with gradient.
        without_gradient: Division of a batch into forward passes without gradient.
        rows: Number of rows of a micro-batch.
        top_p: Total probability of the policy's own nucleus, for `Need.TOP_P`; `None` without it.
        discriminator: Whether to compute `Need.DISCRIMINATOR` when a batch is collected.
    """

    autocast: Callable[[], AbstractContextManager[Any]]
    passes: Passes
    without_gradient: Passes
    rows: int
    top_p: float | None = None
    discriminator: bool = False

    def score(
        self,
        model: Any,
        input_ids: Tensor,
        layout: TurnLayout,
        *,
        candidates: Tensor | None = None,
        with_values: bool = False,
        with_aux_loss: bool = False,
    ) -> tuple[TokenScores, Tensor | None]:
        """Returns the scores of the rows, and the load-balancing loss of a mixture of experts if requested. Collective.

        Args:
            model: A model with TRL's fused LM head.
            input_ids: (B, P + T) token ids.
            layout: Layout of the rows.
            candidates: (B, T, K) token ids of the reference nucleus, padded with -1, for the entropy over it.
            with_values: Whether to compute the critic's values in the same forward pass.
            with_aux_loss: Whether to compute the load-balancing loss.
        """
        options: dict[str, Any] = {"passes": self.passes if torch.is_grad_enabled() else self.without_gradient}
        if with_aux_loss:
            options["output_router_logits"] = True
        if with_values:
            options["with_values"] = True
        turns = cut_turns(input_ids, layout)
        with self.autocast():
            found = score_turns(model, turns, statistics=self._statistics(candidates, turns), **options)
        scores = TokenScores(
            turns.to_rows(found.log_probs),
            turns.to_rows(found.entropy),
            {need: turns.to_rows(values) for need, values in found.head.items()},
            None if found.values is None else _one_value(turns.to_rows(found.values), layout),
        )
        return scores, found.aux_loss

    def _statistics(self, candidates: Tensor | None, turns: TurnBatch) -> Mapping[Need, HeadStatistic]:
        """Returns the requested statistics of the LM head. A new one is one entry here."""
        statistics: dict[Need, HeadStatistic] = {}
        if candidates is not None:
            of_tokens = candidates[turns.row, turns.column]
            statistics[Need.NUCLEUS] = lambda head, tokens: nucleus_entropy(head, of_tokens[tokens])
        if (top_p := self.top_p) is not None:
            statistics[Need.TOP_P] = lambda head, tokens: own_nucleus_entropy(head, top_p)
        if self.discriminator and not torch.is_grad_enabled():  # when a batch is collected
            statistics[Need.DISCRIMINATOR] = lambda head, tokens: mean_discriminator(head)
        return statistics

    def values(self, model: Any, input_ids: Tensor, layout: TurnLayout) -> Tensor:
        """Returns the critic's (B, T) values. Collective under ZeRO-3."""
        turns = cut_turns(input_ids, layout)
        with self.autocast():
            values = value_turns(model, turns, passes=self.without_gradient)
        return _one_value(turns.to_rows(values), layout)

    def nucleus(self, model: Any, input_ids: Tensor, layout: TurnLayout, cut: float) -> Tensor:
        """Returns (B, T, K) candidates, padded with -1, with the smallest possible K. Collective under ZeRO-3.

        Args:
            model: Model whose probabilities select the candidates.
            input_ids: (B, P + T) token ids.
            layout: Layout of the rows.
            cut: Probability above which a token is a candidate.
        """
        turns = cut_turns(input_ids, layout)
        with self.autocast():
            ids = find_nuclei(model, turns, cut, passes=self.without_gradient)
        return turns.to_rows(ids[:, (ids >= 0).any(0)], -1)  # sorted by probability, so padding is on the right

    def features(self, model: Any, input_ids: Tensor, layout: TurnLayout) -> TurnFeatures:
        """Returns the hidden states of the turns of the rows under a model. Collective under ZeRO-3."""
        return extract_features(model, input_ids, layout, self.rows, self.autocast)


def _one_value(values: Tensor, layout: TurnLayout) -> Tensor:
    """Returns (B, T) values. Of two heads, the first gives that of a turn's first token, the second the others."""
    if values.dim() == 2:
        return values
    first, _ = turn_edges(layout.turn_ids, layout.sampled)
    return torch.where(to_device(first, values.device), values[..., 0], values[..., 1])
