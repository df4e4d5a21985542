"""Scores turns as separate sequences, while TRL sees episodes.

A row of the batch is an episode. In windowed context each of its turns is a separate sequence, and a token attends only
to its own turn. The sequences that `turn_layout` cuts out of the rows are sorted by length and run in passes of a
limited number of tokens, right-padded and without an attention mask: no real token can see the padding to its right,
and the fast causal kernels apply.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral import modeling_mixtral

from epo_trl.changed import changed
from epo_trl.devices import to_device
from epo_trl.methods.lm_head import LMHead
from epo_trl.scoring.fused_head import at_head, compact_scoring
from epo_trl.scoring.turn_layout import TurnBatch

# Arguments of the router loss: logits of each layer, (n * l, experts); number of experts; experts per token.
RouterOutput = tuple[tuple[Tensor, ...], int, int]
# Maps the head's input at m sampled tokens, and their (m,) indices among the M of the batch, to (m, ...) values.
HeadStatistic = Callable[[LMHead, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Passes:
    """How the sequences of a batch are divided into forward passes.

    Args:
        tokens: Maximum number of tokens of a pass, padding included. A longer sequence has a pass of its own. `None`
            for one pass.
        recompute: Whether the backward pass runs each forward pass again, except the last one, so that only one keeps
            its activations at a time.
        agree: Function from this rank's number of passes to that of all ranks, the largest. Collective.
    """

    tokens: int | None = None
    recompute: bool = False
    agree: Callable[[int], int] = field(default=lambda count: count, repr=False)

    def sizes(self, lengths: Sequence[int]) -> list[int]:
        """Returns the number of sequences of each pass, in order; 0 for one that only other ranks need.

        There are as few passes as the limit allows, and they are about equally large.

        Args:
            lengths: Lengths of the sequences, the longest first.
        """
        if self.tokens is None:
            return [len(lengths)]
        count = self.agree(len(_fill(lengths, self.tokens)))
        low, high = min(lengths[0], self.tokens), self.tokens
        while low < high:  # the smallest limit with no more passes
            limit = (low + high) // 2
            low, high = (low, limit) if len(_fill(lengths, limit)) <= count else (limit + 1, high)
        sizes = _fill(lengths, high)
        return [*sizes, *[0] * (count - len(sizes))]


def _fill(lengths: Sequence[int], limit: int) -> list[int]:
    sizes: list[int] = []
    longest = 0
    for length in lengths:
        if sizes and (sizes[-1] + 1) * longest <= limit:
            sizes[-1] += 1
        else:
            sizes.append(1)
            longest = length
    return sizes


ONE_PASS = Passes()


@dataclass(slots=True)
class TurnScores:
    """Scores of the M sampled tokens of a batch under the model.

    Args:
        log_probs: (M,) log-probability of each token in nats.
        entropy: (M,) entropy at each token in nats; NaN if the model returned none.
        aux_loss: Load-balancing loss of a mixture of experts over the tokens of turns with a sampled token, if
            `output_router_logits` is set.
        values: (M,) value of the state before each token, or `None` if not requested; (M, 2) from a critic with two
            heads.
        statistics: (M, ...) requested statistics of the distribution at each token.
    """

    log_probs: Tensor
    entropy: Tensor
    aux_loss: Tensor | None
    values: Tensor | None = None
    statistics: Mapping[str, Tensor] = field(default_factory=dict)


def score_turns(
    model: Any,
    batch: TurnBatch,
    *,
    passes: Passes = ONE_PASS,
    statistics: Mapping[str, HeadStatistic] | None = None,
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
    each, router_outputs = list(_cut_passes(batch, passes)), []
    for one in each:
        around = partial(_reading, statistics, one)
        again = passes.recompute and torch.is_grad_enabled() and one is not each[-1]
        with around() as (at_tokens, routed), _recomputing(model, around) if again else nullcontext():
            output = model(**one.inputs, fused_lm_head=True, **model_inputs)
        router_outputs += routed
        for name, values in at_tokens[0].items():
            parts[name].append(values)
        log_probs = one.at_tokens(output.log_probs)
        parts["log_probs"].append(log_probs)
        has_entropy = output.entropy is not None  # TRL does not compute the reference model's
        parts["entropy"].append(one.at_tokens(output.entropy) if has_entropy else torch.full_like(log_probs, torch.nan))
        if output.get("state_values") is not None:
            parts["state_values"].append(one.at_tokens(output.state_values))
    balanced = model_inputs.get("output_router_logits", False)
    found = {name: _in_order(part, each) for name, part in parts.items()}
    return TurnScores(
        log_probs=found["log_probs"],
        entropy=found["entropy"].clamp(min=0),  # log Z - E[z], which rounding makes negative where the policy is sure
        aux_loss=_router_loss(router_outputs, [one.counted for one in each]) if balanced else None,
        values=found.get("state_values"),
        statistics={name: found[name] for name in statistics},
    )


@contextmanager
def _reading(
    statistics: Mapping[str, HeadStatistic], one: _Pass
) -> Iterator[tuple[list[dict[str, Tensor]], list[RouterOutput]]]:
    """Yields the lists that collect the statistics and the router outputs of a forward pass inside the block."""

    def compute(head: LMHead) -> dict[str, Tensor]:
        return {name: statistic(head, one.tokens) for name, statistic in statistics.items()}

    with compact_scoring(), _keeping_router_outputs() as routed, at_head(compute) as at_tokens:
        yield at_tokens, routed


@contextmanager
def _recomputing(model: Any, around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Keeps no activations of the forward passes inside the block: the backward pass runs them again, in `around()`.

    This is gradient checkpointing of the whole model, below the wrapper of DDP or DeepSpeed: the wrapper must see one
    forward and one backward pass.
    """
    inner = extract_model_from_parallel(model)
    original = inner.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        contexts = lambda: (nullcontext(), around())  # noqa: E731
        return checkpoint(original, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    with changed(inner, forward=forward):
        yield


@torch.no_grad()
def value_turns(model: Any, batch: TurnBatch, *, passes: Passes = ONE_PASS) -> Tensor:
    """Returns the (M,) value of the state before each sampled token, without scoring it; (M, 2) from a critic with two
    heads.
    """
    each = list(_cut_passes(batch, passes))
    values = [model(input_ids=one.inputs["input_ids"], values_only=True).state_values[:, :-1] for one in each]
    return _in_order([one.at_tokens(value) for one, value in zip(each, values, strict=True)], each)


@dataclass(slots=True)
class _Pass:
    """One forward pass over n sequences of at most l tokens.

    Args:
        inputs: (n, l) `input_ids` and `labels`.
        counted: (n, l), true on the tokens of turns with a sampled token, false on padding and repeated turns.
        tokens: (m,) indices, as in `TurnBatch`, of the tokens that the head scores, in its order.
        scored: (m,) their positions in the flattened (n, l - 1).
    """

    inputs: dict[str, Tensor]
    counted: Tensor
    tokens: Tensor
    scored: Tensor

    def at_tokens(self, values: Tensor) -> Tensor:
        """Returns (m,) values from the model's (n, l - 1), whose column p - 1 is token p. Differentiable.

        Further dimensions stay.
        """
        return values.flatten(0, 1)[self.scored]


def _in_order(parts: Sequence[Tensor], passes: Sequence[_Pass]) -> Tensor:
    """Returns (M,) values from those of each pass. Differentiable. Further dimensions stay."""
    values = torch.cat(list(parts))
    return torch.empty_like(values).index_copy(0, torch.cat([one.tokens for one in passes]), values)


def _cut_passes(batch: TurnBatch, passes: Passes) -> Iterator[_Pass]:
    device, lengths, columns = batch.input_ids.device, batch.lengths, torch.arange(batch.input_ids.shape[1])
    counted = (columns < lengths.unsqueeze(1)) & (batch.numbers >= 0).any(1, keepdim=True)
    order = lengths.argsort(descending=True)
    for rows in order.split(passes.sizes(lengths[order].tolist())):
        used = bool(len(rows))
        rows = rows if used else order[-1:]  # a pass that only other ranks need scores no token
        longest = max(2, int(lengths[rows].max()))
        is_scored = (batch.numbers[rows, 1:longest] >= 0) & used
        on_device = to_device(rows, device)
        ids, labels = batch.input_ids[on_device, :longest], batch.labels[on_device, :longest]
        yield _Pass(
            {"input_ids": ids, "labels": labels if used else torch.full_like(labels, -100)},
            to_device(counted[rows, :longest] & used, device),
            tokens=to_device(batch.numbers[rows, 1:longest][is_scored], device),
            scored=to_device(is_scored.flatten().nonzero().squeeze(1), device),
        )


@contextmanager
def _keeping_router_outputs() -> Iterator[list[RouterOutput]]:
    """Yields a list that collects the inputs of the fused head's router loss; the head's own loss is 0 meanwhile.

    The head computes the loss in every forward pass, over all tokens if there is no attention mask. Turns are scored
    without one, so it would include padding and passes that a rank makes only to match the others. The head looks up
    the function in `modeling_mixtral` for every model family.
    """
    kept: list[RouterOutput] = []

    def keep(logits: tuple[Tensor, ...], experts: int, per_token: int, attention_mask: Any = None) -> Tensor:
        kept.append((logits, experts, per_token))
        return logits[0].new_zeros(())

    with changed(modeling_mixtral, load_balancing_loss_func=keep):
        yield kept


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
