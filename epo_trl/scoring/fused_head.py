"""Hooks into TRL's fused LM head: the positions that it scores, and distributions over a subset of the vocabulary.

The fused head returns the log-probability of each label and the entropy over the whole vocabulary, and nothing about
other tokens. Its inputs pass through one call inside the model's forward: hidden states, the head's weight (unsharded
there, also under ZeRO-3 and FSDP), scale, soft cap and temperature. Intercepting that call gives the model's own
logits for every architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import trl.trainer.utils as trl_utils
from torch import Tensor
from torch.nn.functional import linear

CHUNK = 2**26  # logits at a time
_Result = TypeVar("_Result")


@contextmanager
def compact_scoring() -> Iterator[None]:
    """Makes TRL's fused LM head skip unlabelled positions on a CPU too; most positions here are unlabelled.

    TRL skips them only on Triton devices. Its alternative keeps shapes static for compilers that need it, which a CPU
    does not. TRL uses the patched name in `trl.trainer.utils` only for this choice.
    """
    original = trl_utils._use_triton
    trl_utils._use_triton = lambda device: device.type == "cpu" or original(device)
    try:
        yield
    finally:
        trl_utils._use_triton = original


@dataclass(frozen=True, slots=True)
class HeadInput:
    """Inputs of the LM head at m positions whose next token has a label.

    Args:
        hidden: Hidden states, (m, H), with gradient.
        weight: Weight of the head, (V, H), with gradient.
        bias: Bias of the head, (V,), or `None`.
        temperature: Divisor of the logits, applied last.
        softcap: Bound of the logits, or `None`.
        scale: Factor of the logits, applied first.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None
    scale: float

    def logits(self, projected: Tensor) -> Tensor:
        """Applies scale, soft cap and temperature to the projection of `hidden` by `weight`."""
        logits = projected * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature

    def cast(self, dtype: torch.dtype) -> HeadInput:
        """Returns the same input in another precision."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype), bias=bias)

    def project(self, hidden: Tensor) -> Tensor:
        """Returns (n, V) projections of (n, H) hidden states, at least in single precision."""
        projected = linear(hidden, self.weight, self.bias)
        return projected.to(torch.promote_types(projected.dtype, torch.float32))


@contextmanager
def at_head(compute: Callable[[HeadInput], _Result], scored: Tensor) -> Iterator[list[_Result]]:
    """Calls `compute` in each forward with `fused_lm_head=True` and yields the list of its results.

    Args:
        compute: Function of the head's input at the labelled positions, row by row.
        scored: Indices, (m,), into the flattened (n, l - 1) where the next token has a label, in ascending order.
    """
    found: list[_Result] = []
    original = trl_utils._ChunkedLogProbFunction

    def apply(*args: Any) -> Any:
        hidden, weight, bias, _, temperature, _, softcap, scale, *_ = args
        if len(hidden) != len(scored):  # devices where the head scores all positions
            hidden = hidden[scored.to(hidden.device)]
        found.append(compute(HeadInput(hidden, weight, bias, temperature, softcap, scale)))
        return original.apply(*args)

    trl_utils._ChunkedLogProbFunction = SimpleNamespace(apply=apply)
    try:
        yield found
    finally:
        trl_utils._ChunkedLogProbFunction = original


@torch.no_grad()
def nucleus(head: HeadInput, cut: float) -> Tensor:
    """Returns (m, K) ids of the tokens with a probability above `cut`, most probable first, padded with -1.

    A position with fewer than two such tokens has only -1: there is no choice. K is the maximum possible number.

    Args:
        head: LM head of the model that defines the nucleus.
        cut: Probability threshold, above 0.
    """
    most = min(int(1 / cut), len(head.weight))
    found = []
    for logits in _logits(head):
        top = logits.softmax(-1).topk(most)
        inside = top.values > cut
        found.append(torch.where(inside & (inside.sum(-1, keepdim=True) > 1), top.indices, -1))
    return torch.cat(found)


@torch.no_grad()
def mean_discriminator(head: HeadInput) -> Tensor:
    """Returns (m,) means of p (H + log p) over each position's distribution, in nats: `sum of p^2 (H + log p)`.

    p (H + log p) is the entropy discriminator of a token with probability p (arXiv 2602.03392, Theorem 3.2).
    """
    found = []
    for logits in _logits(head):
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1, keepdim=True)
        found.append((p.square() * (entropy + log_p)).sum(-1))
    return torch.cat(found)


def _logits(head: HeadInput) -> Iterator[Tensor]:
    """Yields (n, V) logits of a few positions at a time, at least in single precision."""
    head = head.cast(head.hidden.dtype)
    for hidden in head.hidden.split(max(1, CHUNK // len(head.weight))):
        yield head.logits(head.project(hidden))


def nucleus_entropy(head: HeadInput, candidates: Tensor) -> Tensor:
    """Returns (m,) entropies of the model restricted to, and renormalised over, the candidates of each position.

    In nats, 0 where there are none. Differentiable through the hidden states and the candidates' rows of the weight.

    Args:
        head: LM head of the measured model.
        candidates: Token ids, (m, K), padded with -1.
    """
    inside = candidates >= 0
    row, column = inside.nonzero(as_tuple=True)
    ids = candidates[row, column]
    wide = torch.promote_types(head.hidden.dtype, torch.float32)
    projected = (head.hidden[row].to(wide) * head.weight[ids].to(wide)).sum(-1)
    if head.bias is not None:
        projected = projected + head.bias[ids]
    # -inf outside the candidates, but 0 in rows without any: a row of infinities has no gradient.
    outside = torch.zeros(inside.shape, dtype=wide, device=inside.device)
    outside = outside.masked_fill(inside.any(-1, keepdim=True), -torch.inf)
    log_p = outside.index_put((row, column), head.logits(projected)).log_softmax(-1)
    return -(log_p.exp() * log_p.masked_fill(~inside, 0.0)).sum(-1)
