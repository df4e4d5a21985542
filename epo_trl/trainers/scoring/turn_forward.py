"""Scores turns as separate sequences, while TRL sees episodes.

A row of the batch is an episode. In windowed context each of its turns is a separate sequence, and a token attends only
to its own turn. The sequences that `turn_layout` cuts out of the rows run without an attention mask, and the results
are put back at TRL's positions. They run in passes of a limited number of tokens: as right-padded causal batches, where
no real token can see the padding to its right and the fast causal kernels apply, or packed into one row whose positions
restart with every sequence, by which transformers separates them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.mixtral import modeling_mixtral

from epo_trl.devices import to_device
from epo_trl.methods import Need
from epo_trl.trainers.scoring.fused_head import HeadInput, at_head, compact_scoring, nucleus
from epo_trl.trainers.scoring.turn_layout import TurnBatch

# Arguments of the router loss: logits of each layer, (n * l, experts); number of experts; experts per token.
RouterOutput = tuple[tuple[Tensor, ...], int, int]
# Maps the head's input at m sampled tokens, and their (m,) indices among the M of the batch, to (m,) values.
HeadStatistic = Callable[[HeadInput, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Passes:
    """How the sequences of a batch are divided into forward passes.

    Args:
        tokens: Maximum number of tokens of a pass, padding included. A longer sequence has a pass of its own. `None`
            for one pass.
        packed: Whether the sequences of a pass are one row without padding.
        agree: Function from this rank's number of passes to that of all ranks, the largest. Collective.
    """

    tokens: int | None = None
    packed: bool = False
    agree: Callable[[int], int] = field(default=lambda count: count, repr=False)

    def sizes(self, lengths: Sequence[int]) -> list[int]:
        """Returns the number of sequences of each pass, in order; 0 for one that only other ranks need.

        There are as few passes as the limit allows, and they are about equally large.

        Args:
            lengths: Lengths of the sequences; without packing, the longest first.
        """
        if self.tokens is None:
            return [len(lengths)]
        count = self.agree(len(self._fill(lengths, self.tokens)))
        low, high = min(max(lengths), self.tokens), self.tokens
        while low < high:  # the smallest limit with no more passes
            limit = (low + high) // 2
            low, high = (low, limit) if len(self._fill(lengths, limit)) <= count else (limit + 1, high)
        sizes = self._fill(lengths, high)
        return [*sizes, *[0] * (count - len(sizes))]

    def _fill(self, lengths: Sequence[int], limit: int) -> list[int]:
        sizes: list[int] = []
        used = longest = 0
        for length in lengths:
            total = used + length if self.packed else (sizes[-1] + 1 if sizes else 1) * longest
            if sizes and total <= limit:
                sizes[-1] += 1
                used += length
            else:
                sizes.append(1)
                used = longest = length
        return sizes


ONE_PASS = Passes()


@dataclass(slots=True)
class TurnScores:
    """Scores of a batch of turns under the model.

    Args:
        log_probs: (N, L - 1) log-probability of each sampled token in nats, 0 elsewhere; column p - 1 is token p.
        entropy: (N, L - 1) entropy at each sampled token in nats, 0 elsewhere; NaN if the model returned none.
        aux_loss: Load-balancing loss of a mixture of experts over the tokens of turns with a sampled token, if
            `output_router_logits` is set.
        values: (N, L - 1) value of the state before each token, or `None` if not requested; (N, L - 1, 2) from a critic
            with two heads.
        head: (N, L - 1) requested statistics of the distribution at each sampled token, 0 elsewhere.
    """

    log_probs: Tensor
    entropy: Tensor
    aux_loss: Tensor | None
    values: Tensor | None = None
    head: Mapping[Need, Tensor] = field(default_factory=dict)


def score_turns(
    model: Any,
    batch: TurnBatch,
    *,
    passes: Passes = ONE_PASS,
    statistics: Mapping[Need, HeadStatistic] | None = None,
    **model_inputs: Any,
) -> TurnScores:
    """Returns the scores of a batch of turns. Only sampled tokens go through the LM head.

    Args:
        model: A model with TRL's fused LM head.
        batch: The turns.
        passes: Division into forward passes, as many on every rank.
        statistics: Statistics of the distribution at each sampled token.
        **model_inputs: Passed to the model.
    """
    statistics = statistics or {}
    parts: dict[str, list[Tensor]] = defaultdict(list)
    each = list(_cut_passes(batch, passes))
    with compact_scoring(), _keeping_router_outputs() as router_outputs:
        for one in each:
            with at_head(partial(_compute_all, statistics, one.tokens), one.scored) as at_tokens:
                output = model(**one.inputs, labels=one.labels, fused_lm_head=True, **model_inputs)
            for need, values in at_tokens[0].items():
                parts[need].append(one.put_back(one.spread(values)))
            parts["log_probs"].append(one.put_back(output.log_probs))
            has_entropy = output.entropy is not None  # TRL does not compute the reference model's
            entropy = output.entropy if has_entropy else torch.full_like(output.log_probs, torch.nan)
            parts["entropy"].append(one.put_back(entropy))
            if output.get("state_values") is not None:
                parts["state_values"].append(one.put_back(output.state_values))
    balanced = model_inputs.get("output_router_logits", False)
    sums = {name: torch.stack(part).sum(0) for name, part in parts.items()}
    return TurnScores(
        log_probs=sums["log_probs"],
        entropy=sums["entropy"].clamp(min=0),  # log Z - E[z], which rounding makes negative where the policy is certain
        aux_loss=_router_loss(router_outputs, [one.counted for one in each]) if balanced else None,
        values=sums.get("state_values"),
        head={need: sums[need] for need in statistics},
    )


def _compute_all(statistics: Mapping[Need, HeadStatistic], tokens: Tensor, head: HeadInput) -> dict[Need, Tensor]:
    return {need: statistic(head, tokens) for need, statistic in statistics.items()}


@torch.no_grad()
def find_nuclei(model: Any, batch: TurnBatch, cut: float, *, passes: Passes = ONE_PASS) -> Tensor:
    """Returns (M, K) candidates for each sampled token, as `fused_head.nucleus` defines them; see `score_turns`."""
    each, found = list(_cut_passes(batch, passes)), []
    with compact_scoring():
        for one in each:
            with at_head(partial(nucleus, cut=cut), one.scored) as candidates:
                model(**one.inputs, labels=one.labels, fused_lm_head=True)
            found += candidates
    ids = torch.cat(found)
    tokens = torch.cat([one.tokens for one in each])
    return ids.new_empty(len(batch.sequence), ids.shape[1]).index_copy_(0, tokens, ids)


def value_turns(model: Any, batch: TurnBatch, *, passes: Passes = ONE_PASS) -> Tensor:
    """Returns the (N, L - 1) values of the state before each token, without scoring the tokens; (N, L - 1, 2) from a
    critic with two heads.
    """
    values = [
        one.put_back(model(**one.inputs, values_only=True).state_values[:, :-1]) for one in _cut_passes(batch, passes)
    ]
    return torch.stack(values).sum(0)


@dataclass(slots=True)
class _Pass:
    """One forward pass.

    Args:
        inputs: (n, l) `input_ids`, and `position_ids` if they differ from the column indices.
        labels: (n, l) labels.
        counted: (n, l), true on the tokens of turns with a sampled token, false on padding and repeated turns.
        tokens: (m,) indices, as in `TurnBatch`, of the tokens that the head scores, in its order.
        scored: (m,) their positions in the flattened (n, l - 1).
        source: Index of the used results in the model's (n, l - 1).
        target: Index of their positions in (N, L - 1).
        shape: (N, L - 1).
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    counted: Tensor
    tokens: Tensor
    scored: Tensor
    source: Any
    target: tuple[Tensor, Tensor]
    shape: tuple[int, int]

    def put_back(self, values: Tensor) -> Tensor:
        """Returns (N, L - 1) values from the model's (n, l - 1), 0 where this pass has none. Differentiable.

        Further dimensions stay.
        """
        return values.new_zeros(*self.shape, *values.shape[2:]).index_put(self.target, values[self.source])

    def spread(self, scored: Tensor) -> Tensor:
        """Returns (n, l - 1) values from those of the m scored tokens, 0 elsewhere. Differentiable."""
        rows, columns = self.labels.shape
        return scored.new_zeros(rows * (columns - 1)).index_put((self.scored,), scored).view(rows, columns - 1)


def _cut_passes(batch: TurnBatch, passes: Passes) -> Iterator[_Pass]:
    lengths, columns = batch.lengths, torch.arange(batch.input_ids.shape[1])
    real = columns < lengths.unsqueeze(1)
    counted = real & (batch.numbers >= 0).any(1, keepdim=True)
    # The longest first, against padding; packing has none.
    order = torch.arange(len(lengths)) if passes.packed else lengths.argsort(descending=True)
    for rows in order.split(passes.sizes(lengths[order].tolist())):
        used = len(rows)
        rows = rows if used else order[-1:]  # the result of a pass for other ranks is discarded
        at: tuple[Tensor, Tensor]
        if passes.packed:
            row, position = real[rows].nonzero(as_tuple=True)
            (later,) = position.nonzero(as_tuple=True)  # the first token of a sequence has no prediction
            sequence, later = rows[row], later[: len(later) * bool(used)]
            at, target = (sequence[None], position[None]), (sequence[later], position[later] - 1)
            source: Any = (0, to_device(later - 1, batch.input_ids.device))
        else:
            longest = max(2, int(lengths[rows].max()))
            at = (rows.unsqueeze(1), columns[:longest].unsqueeze(0))
            source, target = slice(0, used), (at[0][:used], at[1][:, :-1])
        one = _pass(batch, at, counted[at] & bool(used), source, target)
        if passes.packed:
            one.inputs["position_ids"] = to_device(at[1], batch.input_ids.device)
        yield one


def _pass(
    batch: TurnBatch, at: tuple[Tensor, Tensor], counted: Tensor, source: Any, target: tuple[Tensor, Tensor]
) -> _Pass:
    """Builds the pass over the tokens `at` two indices of the batch. All indices except the source are on the CPU."""
    device = batch.input_ids.device
    numbers = batch.numbers[at][:, 1:]
    is_scored = numbers >= 0
    rows, columns = (to_device(index, device) for index in at)
    return _Pass(
        {"input_ids": batch.input_ids[rows, columns]},
        batch.labels[rows, columns],
        to_device(counted, device),
        tokens=to_device(numbers[is_scored], device),
        scored=to_device(is_scored.flatten().nonzero().squeeze(1), device),
        source=source,
        target=(to_device(target[0], device), to_device(target[1], device)),
        shape=(len(batch.input_ids), batch.input_ids.shape[1] - 1),
    )


@contextmanager
def _keeping_router_outputs() -> Iterator[list[RouterOutput]]:
    """Yields a list that collects the inputs of the fused head's router loss; the head's own loss is 0 meanwhile.

    The head computes the loss in every forward pass, over all tokens if there is no attention mask. Turns are scored
    without one, so it would include padding and passes that a rank makes only to match the others. The head looks up
    the function in `modeling_mixtral` for every model family.
    """
    original, kept = modeling_mixtral.load_balancing_loss_func, []

    def keep(logits: tuple[Tensor, ...], experts: int, per_token: int, attention_mask: Any = None) -> Tensor:
        kept.append((logits, experts, per_token))
        return logits[0].new_zeros(())

    modeling_mixtral.load_balancing_loss_func = keep
    try:
        yield kept
    finally:
        modeling_mixtral.load_balancing_loss_func = original


def _router_loss(outputs: Sequence[RouterOutput], counted: Sequence[Tensor]) -> Tensor:
    """Returns the load-balancing loss over all passes, 0 if no token counts. Differentiable.

    Args:
        outputs: Router outputs of each pass.
        counted: (n, l) boolean for each pass, true on the tokens that count.
    """
    _, experts, per_token = outputs[0]
    layers = zip(*(logits for logits, _, _ in outputs), strict=True)
    logits = tuple(torch.cat([part.reshape(-1, experts) for part in layer]) for layer in layers)
    mask = torch.cat([tokens.flatten() for tokens in counted])
    any_token = mask.any()
    loss = modeling_mixtral.load_balancing_loss_func(logits, experts, per_token, mask | ~any_token)
    return loss * any_token
