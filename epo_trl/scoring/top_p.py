"""The entropy of a policy over its own nucleus: the fewest tokens that together hold `top_p` of the probability.

Finding the nucleus needs the full distribution at a position. Distributions are computed for a few positions at a time,
recomputed in the backward pass where there is a gradient, and never stored.
"""

from __future__ import annotations

from typing import Any

import torch
import trl.trainer.utils as trl_utils
from torch import Tensor
from torch.autograd.function import once_differentiable

from epo_trl.scoring.fused_head import HeadInput

CHUNK = 2**24  # logits at a time; the backward pass holds several tensors of that size
FEW = 64  # most nuclei are not larger; sorting a whole vocabulary takes fifteen times as long as finding these
_ROUNDING = 1e-6  # tolerance within which a sum of probabilities has reached `top_p`


def top_p_entropy(logits: Tensor, top_p: float) -> Tensor:
    """Returns (n,) entropies in nats of distributions restricted to, and renormalised over, their nuclei.

    All tokens tied at the edge of a nucleus are inside. Differentiable; the nucleus itself is treated as constant.

    Args:
        logits: Logits, (n, V).
        top_p: Probability mass of the nucleus in (0, 1]; 1 is the whole vocabulary.
    """
    with torch.no_grad():
        p = logits.softmax(-1)
        outside = p < _least_inside(p, top_p)
    log_q = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
    return -(log_q.exp() * log_q.masked_fill(outside, 0.0)).sum(-1)


def _least_inside(p: Tensor, top_p: float) -> Tensor:
    """Returns (n, 1), the smallest probability inside each nucleus."""
    least, wider = _last_needed(p.topk(min(FEW, p.shape[-1])).values, top_p)
    if FEW < p.shape[-1]:
        rows = wider.nonzero().squeeze(1)
        least[rows], _ = _last_needed(p[rows].sort(-1, descending=True).values, top_p)
    return least


def _last_needed(ordered: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Returns (n, 1) the last of (n, k) descending probabilities needed for `top_p`, and (n,) whether all are."""
    needed = ordered.cumsum(-1) - ordered < top_p - _ROUNDING
    needed[:, 0] = True
    return ordered.gather(-1, needed.sum(-1, keepdim=True) - 1), needed.all(-1)


def own_nucleus_entropy(head: HeadInput, top_p: float) -> Tensor:
    """Returns (m,) entropies in nats of the model over its own nucleus at each position; see `top_p_entropy`.

    Differentiable through the hidden states and the head.
    """
    result: Tensor = _OwnNucleus.apply(
        head.hidden, head.weight, head.bias, (head.temperature, head.softcap, head.scale), top_p
    )
    return result


class _OwnNucleus(torch.autograd.Function):
    """Recomputes the logits in the backward pass, at positions whose entropy has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[Any, ...], top_p: float
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        kind = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.settings, ctx.top_p = settings, top_p
        head = _head(ctx, hidden, weight, bias)
        parts = (head.logits(head.project(part)) for part in _parts(head.hidden, head))
        return torch.cat([top_p_entropy(logits, top_p) for logits in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        chosen = gradient.nonzero().squeeze(1)
        on_chosen, on_weight, on_bias = [], None, None
        with trl_utils.maybe_gather_lm_head_ctx(weight, bias):  # ZeRO-3 has sharded them again since the forward pass
            head = _head(ctx, hidden[chosen], weight, bias)
            if needs_weight:
                on_weight = gradient.new_zeros(weight.shape)
            if needs_bias:
                on_bias = gradient.new_zeros(bias.shape)
            for part, above in zip(_parts(head.hidden, head), _parts(gradient[chosen], head), strict=True):
                with torch.enable_grad():
                    projected = head.project(part).requires_grad_()
                    entropy = top_p_entropy(head.logits(projected), ctx.top_p)
                (slope,) = torch.autograd.grad(entropy, projected, above)
                narrow = slope.to(ctx.dtype)
                on_chosen.append(narrow @ head.weight)
                if on_weight is not None:
                    on_weight += narrow.T @ part
                if on_bias is not None:
                    on_bias += slope.sum(0)
        on_hidden = torch.zeros_like(hidden)
        on_hidden[chosen] = torch.cat(on_chosen).to(hidden.dtype)
        return (
            on_hidden if needs_hidden else None,
            None if on_weight is None else on_weight.to(weight.dtype),
            None if on_bias is None else on_bias.to(bias.dtype),
            None,
            None,
        )


def _head(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> HeadInput:
    """Returns the head in the precision of the forward pass."""
    return HeadInput(hidden, weight, bias, *ctx.settings).cast(ctx.dtype)


def _parts(per_position: Tensor, head: HeadInput) -> tuple[Tensor, ...]:
    """Splits a tensor over positions into parts whose logits fit in `CHUNK`; one empty part without positions."""
    return per_position.split(max(1, CHUNK // len(head.weight)))
