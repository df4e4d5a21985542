"""Inside of TRL's fused LM head: which positions it takes, and a model on a few tokens of its vocabulary.

The fused head returns the log-probability of each label and the entropy over the whole vocabulary, and nothing about
single other tokens. All that it computes them from goes through one call inside of the model's forward: hidden states,
the head's weight (whole there, under ZeRO-3 and FSDP too), scale, soft cap and temperature. Whoever watches that call
knows the model's own logits, whatever its architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from torch import Tensor
from torch.nn.functional import linear

CHUNK = 2**26  # logits at a time


@contextmanager
def compact_scoring() -> Iterator[None]:
    """TRL's fused LM head skips unlabelled positions only on Triton devices; most of ours are unlabelled.

    Its alternative keeps shapes static for compilers that need it, which a CPU does not. The name is looked up in
    `trl.trainer.utils` for this choice alone.
    """
    original = trl_utils._use_triton
    trl_utils._use_triton = lambda device: device.type == "cpu" or original(device)
    try:
        yield
    finally:
        trl_utils._use_triton = original


@dataclass(frozen=True, slots=True)
class HeadInput:
    """What the head is given for m positions whose next token has a label.

    Args:
        hidden: (m, H), with gradient.
        weight: (V, H), with gradient.
        bias: (V,) or `None`.
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
        """Returns logits made of what `hidden` and `weight` gave."""
        logits = projected * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature


@contextmanager
def at_head(compute: Callable[[HeadInput], Tensor] | None, scored: Tensor) -> Iterator[list[Tensor]]:
    """Yields a list that gets what `compute` returns in each call of a model with `fused_lm_head=True`.

    Args:
        compute: From the labelled positions, row by row, to a tensor; with `None` the list stays empty.
        scored: (m,) the places in the flattened (n, l - 1) where the next token has a label, in ascending order.
    """
    found: list[Tensor] = []
    if compute is None:
        yield found
        return
    original = trl_utils._ChunkedLogProbFunction

    def apply(*args: Any) -> Any:
        hidden, weight, bias, _, temperature, _, softcap, scale, *_ = args
        if len(hidden) != len(scored):  # devices where the head takes all positions
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
    """Returns (m, K) ids of the tokens with a probability above `cut`, most probable first, then -1.

    A position with less than two has -1 only: there is nothing to choose. K is the largest number there can be.

    Args:
        head: LM head of the model that decides.
        cut: Above 0.
    """
    most = min(int(1 / cut), len(head.weight))
    found = []
    for hidden in head.hidden.split(max(1, CHUNK // len(head.weight))):
        weight, bias = (None if x is None else x.to(hidden.dtype) for x in (head.weight, head.bias))
        assert weight is not None
        top = head.logits(linear(hidden, weight, bias).float()).softmax(-1).topk(most)
        inside = top.values > cut
        found.append(torch.where(inside & (inside.sum(-1, keepdim=True) > 1), top.indices, -1))
    return torch.cat(found)


def nucleus_entropy(head: HeadInput, candidates: Tensor) -> Tensor:
    """Returns (m,) entropies of the model restricted to, and renormalised over, the candidates of each position.

    In nats, 0 where there are none. Differentiable, through the hidden states and the candidates' rows of the weight.

    Args:
        head: LM head of the measured model.
        candidates: (m, K) token ids, -1 where there is none.
    """
    inside = candidates >= 0
    row, column = inside.nonzero(as_tuple=True)
    ids = candidates[row, column]
    wide = torch.promote_types(head.hidden.dtype, torch.float32)
    projected = (head.hidden[row].to(wide) * head.weight[ids].to(wide)).sum(-1)
    if head.bias is not None:
        projected = projected + head.bias[ids]
    # Outside of the candidates, but finite where there are none: a row of infinities has no gradient.
    outside = torch.zeros(inside.shape, dtype=wide, device=inside.device)
    outside = outside.masked_fill(inside.any(-1, keepdim=True), -torch.inf)
    log_p = outside.index_put((row, column), head.logits(projected)).log_softmax(-1)
    return -(log_p.exp() * log_p.masked_fill(~inside, 0.0)).sum(-1)
