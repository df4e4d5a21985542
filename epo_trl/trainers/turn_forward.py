"""TRL sees episodes, the model sees turns.

A row of the batch is an episode; in windowed context each of its turns is a sequence of its own, and a token attends
to nothing but its own turn. The sequences are cut out of the row, run without an attention mask, and the results are
put back where TRL expects them. They run as right-padded causal batches (no real token can see the padding to its
right, and the fast causal kernels apply), or packed into one row whose positions start anew with every sequence, by
which transformers keeps them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epo_trl.models.fused_head import at_head, compact_scoring, nucleus, nucleus_entropy
from epo_trl.models.top_p import own_nucleus_entropy
from epo_trl.trainers.router_loss import keeping_router_outputs, router_loss


@dataclass(slots=True)
class TurnLayout:
    """Which turn each completion token belongs to, and which tokens were sampled.

    Args:
        turn_ids: (B, T) integers, -1 on padding.
        response_mask: (B, T), 1 on sampled tokens.
        windowed: Whether a turn is a sequence of its own. Otherwise the row is one sequence.
    """

    turn_ids: Tensor
    response_mask: Tensor
    windowed: bool

    def rows(self, start: int, end: int) -> TurnLayout:
        """Returns the layout of the rows from `start` to `end`."""
        return TurnLayout(self.turn_ids[start:end], self.response_mask[start:end], self.windowed)


@dataclass(slots=True)
class TurnBatch:
    """Sequences cut out of rows.

    Args:
        input_ids: (N, L), right-padded with 0.
        labels: (N, L), the token id on sampled tokens, -100 elsewhere.
        lengths: (N,) tokens of each sequence.
        sequence: (M,) for each sampled token, its sequence.
        position: (M,) its position in that sequence, always >= 1.
        response_mask: (B, T) boolean; its M true positions are the same tokens, in the same order.
    """

    input_ids: Tensor
    labels: Tensor
    lengths: Tensor
    sequence: Tensor
    position: Tensor
    response_mask: Tensor

    def to_rows(self, per_token: Tensor) -> Tensor:
        """Returns (B, T) values from the model's (N, L - 1), where column p - 1 holds the value of token p.

        Positions that were not sampled are 0. Differentiable.
        """
        rows = per_token.new_zeros(self.response_mask.shape)
        return rows.masked_scatter(self.response_mask, per_token[self.sequence, self.position - 1])

    @property
    def numbers(self) -> Tensor:
        """(N, L) which of the M sampled tokens a token is, -1 for the others."""
        numbers = torch.full_like(self.labels, -1)
        numbers[self.sequence, self.position] = torch.arange(len(self.sequence), device=numbers.device)
        return numbers


def cut_turns(input_ids: Tensor, attention_mask: Tensor, layout: TurnLayout) -> TurnBatch:
    """Returns the sequences of a batch of rows.

    Args:
        input_ids: (B, P + T), left-padded prompts and right-padded completions.
        attention_mask: (B, P + T), 0 on padding.
        layout: Of the last T columns.
    """
    rows, width = input_ids.shape
    prompt_width = width - layout.turn_ids.shape[1]
    # Padding is told by the turn ids, not by TRL's completion mask: that one is also cleared by
    # `mask_truncated_completions`, which must not change what the other tokens see.
    real = torch.cat([attention_mask[:, :prompt_width].bool(), layout.turn_ids >= 0], dim=1)
    response = torch.zeros_like(real)
    response[:, prompt_width:] = layout.response_mask.bool() & (layout.turn_ids >= 0)

    segment = torch.zeros_like(input_ids)
    if layout.windowed:
        segment[:, prompt_width:] = layout.turn_ids.clamp(min=0)
    per_row = segment.amax(1) + 1
    segment = segment + (per_row.cumsum(0) - per_row).unsqueeze(1)

    flat = segment[real]  # turns are contiguous in a row, so this is sorted
    lengths = torch.bincount(flat, minlength=int(per_row.sum()))
    position = torch.arange(flat.numel(), device=flat.device) - (lengths.cumsum(0) - lengths)[flat]
    shape = (lengths.numel(), max(2, int(lengths.max())))
    ids = input_ids.new_zeros(shape)
    ids[flat, position] = input_ids[real]
    is_response = response[real]
    labels = torch.full_like(ids, -100)
    labels[flat[is_response], position[is_response]] = input_ids[real][is_response]
    return TurnBatch(
        input_ids=ids,
        labels=labels,
        lengths=lengths,
        sequence=flat[is_response],
        position=position[is_response],
        response_mask=response[:, prompt_width:],
    )


@dataclass(slots=True)
class TurnScores:
    """What the model says about a batch of turns.

    Args:
        log_probs: (N, L - 1) log-probability of each sampled token in nats, 0 elsewhere; column p - 1 is token p.
        entropy: (N, L - 1) entropy of its distribution in nats, 0 elsewhere; `None` if the model was not asked.
        aux_loss: Load-balancing loss of a mixture of experts over the tokens of turns with a sampled token, if
            `output_router_logits` was asked for.
        values: (N, L - 1) value of the state in which each token came, or `None` if the model was not asked.
        nucleus_entropy: (N, L - 1) entropy over the candidates of each token in nats, 0 where there are none; `None`
            without candidates.
        top_p_entropy: (N, L - 1) entropy over the model's own nucleus in nats, 0 elsewhere; `None` without `top_p`.
    """

    log_probs: Tensor
    entropy: Tensor | None
    aux_loss: Tensor | None
    values: Tensor | None = None
    nucleus_entropy: Tensor | None = None
    top_p_entropy: Tensor | None = None


def score_turns(
    model: Any,
    batch: TurnBatch,
    *,
    buckets: int = 1,
    packed: bool = False,
    candidates: Tensor | None = None,
    top_p: float | None = None,
    **model_inputs: Any,
) -> TurnScores:
    """Returns the scores of a batch of turns; only sampled tokens go through the LM head.

    Args:
        model: With TRL's fused LM head.
        batch: The turns.
        buckets: Forward passes to spread the turns over, sorted by length, so that less padding is computed. The
            number of passes is the same on every rank, whatever the number of turns.
        packed: Whether all turns run as one row without padding instead.
        candidates: (M, K) token ids for each sampled token, -1 where there is none.
        top_p: Of the nucleus that `top_p_entropy` is about.
        **model_inputs: Passed to the model.
    """
    log_probs, entropy, values, inside, own = [], [], [], [], []
    within = None if top_p is None else partial(own_nucleus_entropy, top_p=top_p)
    passes = list(_passes(batch, buckets, packed))
    with compact_scoring(), keeping_router_outputs() as router_outputs:
        for one in passes:
            restrict = None if candidates is None else partial(nucleus_entropy, candidates=candidates[one.tokens])
            with at_head(restrict, one.labelled) as found, at_head(within, one.labelled) as found_own:
                output = model(**one.inputs, labels=one.labels, fused_lm_head=True, **model_inputs)
            inside += [one.put_back(one.spread(x)) for x in found]
            own += [one.put_back(one.spread(x)) for x in found_own]
            log_probs.append(one.put_back(output.log_probs))
            if output.entropy is not None:
                entropy.append(one.put_back(output.entropy))
            if output.get("state_values") is not None:
                values.append(one.put_back(output.state_values))
    balanced = model_inputs.get("output_router_logits", False)
    return TurnScores(
        log_probs=torch.stack(log_probs).sum(0),
        entropy=torch.stack(entropy).sum(0) if entropy else None,
        aux_loss=router_loss(router_outputs, [one.counted for one in passes]) if balanced else None,
        values=torch.stack(values).sum(0) if values else None,
        nucleus_entropy=torch.stack(inside).sum(0) if inside else None,
        top_p_entropy=torch.stack(own).sum(0) if own else None,
    )


@torch.no_grad()
def nucleus_of_turns(model: Any, batch: TurnBatch, cut: float, *, buckets: int = 1, packed: bool = False) -> Tensor:
    """Returns (M, K) candidates for each sampled token: see [`epo_trl.models.fused_head.nucleus`].

    Args:
        model: As for `score_turns`.
        batch: The turns.
        cut: Probability above which a token is a candidate.
        buckets: As for `score_turns`.
        packed: As for `score_turns`.
    """
    passes, found = list(_passes(batch, buckets, packed)), []
    with compact_scoring():
        for one in passes:
            with at_head(partial(nucleus, cut=cut), one.labelled) as candidates:
                model(**one.inputs, labels=one.labels, fused_lm_head=True)
            found += candidates
    ids = torch.cat(found)
    return ids.new_empty(len(batch.sequence), ids.shape[1]).index_copy_(0, torch.cat([p.tokens for p in passes]), ids)


def value_turns(model: Any, batch: TurnBatch, *, buckets: int = 1, packed: bool = False) -> Tensor:
    """Returns (N, L - 1) values of the state in which each token came, without scoring the tokens.

    Args:
        model: With a critic (`epo_trl.models.critic`).
        batch: The turns.
        buckets: As for `score_turns`.
        packed: As for `score_turns`.
    """
    values = [
        one.put_back(model(**one.inputs, values_only=True).state_values[:, :-1])
        for one in _passes(batch, buckets, packed)
    ]
    return torch.stack(values).sum(0)


@dataclass(slots=True)
class _Pass:
    """One forward pass.

    Args:
        inputs: (n, l) `input_ids`, and `position_ids` if they are not those of the columns.
        labels: (n, l).
        numbers: (n, l) of the labels, as in `TurnBatch`.
        counted: (n, l), true on the tokens of turns with a sampled token. Padding and repeated turns are not.
        source: Index of the results that count in the model's (n, l - 1).
        target: Index of their places in (N, L - 1).
        shape: (N, L - 1).
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    numbers: Tensor
    counted: Tensor
    source: Any
    target: tuple[Tensor, Tensor]
    shape: tuple[int, int]

    def put_back(self, values: Tensor) -> Tensor:
        """Returns (N, L - 1) values from the model's, 0 where this pass has none. Differentiable."""
        return values.new_zeros(self.shape).index_put(self.target, values[self.source])

    def spread(self, scored: Tensor) -> Tensor:
        """Returns (n, l - 1) values from those of the m tokens that the head scores, 0 elsewhere. Differentiable."""
        return scored.new_zeros(self.labelled.shape).masked_scatter(self.labelled, scored)

    @property
    def labelled(self) -> Tensor:
        """(n, l - 1) boolean, where the next token has a label."""
        return self.labels[:, 1:] != -100

    @property
    def tokens(self) -> Tensor:
        """(m,) numbers of the tokens that the head scores, in its order."""
        return self.numbers[:, 1:][self.labelled]


def _passes(batch: TurnBatch, buckets: int, packed: bool) -> Iterator[_Pass]:
    ids, labels, numbers, lengths = batch.input_ids, batch.labels, batch.numbers, batch.lengths
    shape, columns = (len(ids), ids.shape[1] - 1), torch.arange(ids.shape[1], device=ids.device)
    real = columns < lengths.unsqueeze(1)
    counted = real & (labels != -100).any(1, keepdim=True)
    if packed:
        sequence, position = real.nonzero(as_tuple=True)
        inputs = {"input_ids": ids[sequence, position][None], "position_ids": position[None]}
        (later,) = position.nonzero(as_tuple=True)  # a sequence's first token is predicted by nothing
        target = (sequence[later], position[later] - 1)
        places = (sequence, position)
        yield _Pass(
            inputs, labels[places][None], numbers[places][None], counted[places][None], (0, later - 1), target, shape
        )
        return
    order = lengths.argsort()
    for rows in order.tensor_split(buckets):
        used = len(rows)
        if not used:
            rows = order[:1]  # every rank makes the same number of passes; this one's result is not used
        longest = max(2, int(lengths[rows].max()))
        target = (rows[:used].unsqueeze(1), columns[: longest - 1].unsqueeze(0))
        inputs = {"input_ids": ids[rows, :longest]}
        tokens = counted[rows, :longest] if used else torch.zeros_like(counted[rows, :longest])
        at = (rows, slice(longest))
        yield _Pass(inputs, labels[at], numbers[at], tokens, slice(0, used), target, shape)
