"""The LM head at the sampled tokens: what a method's own statistic of the distributions is computed from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

CHUNK = 2**24  # logits at a time; a backward pass holds several tensors of that size
_Compute = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LMHead:
    """Inputs of the LM head at m positions whose next token was sampled.

    Args:
        hidden: Hidden states, (m, H), with gradient.
        weight: Weight of the head, (V, H), with gradient.
        bias: Bias of the head, (V,), or `None`.
        temperature: Divisor of the logits, applied last.
        softcap: Bound of the logits, or `None`.
        scale: Factor of the logits, applied first.
        gathered: Context in which weight and bias are whole in a backward pass, although ZeRO-3 shards them.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None
    scale: float
    gathered: Callable[..., AbstractContextManager[Any]] = lambda *parameters: nullcontext()

    def logits(self, projected: Tensor) -> Tensor:
        """Applies scale, soft cap and temperature to the projection of `hidden` by `weight`."""
        logits = projected * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature

    def map(self, compute: _Compute) -> Tensor:
        """Returns (m,) values of whole distributions, differentiable through the hidden states and the head.

        Logits are computed for a few positions at a time and again in the backward pass, never stored.

        Args:
            compute: Function from (n, V) logits, at least in single precision, to (n,) values; without a gradient also
                to (n, ...).
        """
        settings = (self.temperature, self.softcap, self.scale, self.gathered)
        result: Tensor = _Map.apply(self.hidden, self.weight, self.bias, settings, compute)
        return result

    def cast(self, dtype: torch.dtype) -> LMHead:
        """Returns the same input in another precision."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype), bias=bias)

    def project(self, hidden: Tensor) -> Tensor:
        """Returns (n, V) projections of (n, H) hidden states, at least in single precision."""
        projected = linear(hidden, self.weight, self.bias)
        return projected.to(torch.promote_types(projected.dtype, torch.float32))

    def parts(self, per_position: Tensor) -> tuple[Tensor, ...]:
        """Splits a tensor over positions into parts whose logits fit in `CHUNK`; one empty part without positions."""
        return per_position.split(max(1, CHUNK // len(self.weight)))


class _Map(torch.autograd.Function):
    """Recomputes the logits in the backward pass, at positions whose value has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[Any, ...], compute: _Compute
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        kind = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.settings, ctx.compute = settings, compute
        head = LMHead(hidden, weight, bias, *settings).cast(ctx.dtype)
        return torch.cat([compute(head.logits(head.project(part))) for part in head.parts(head.hidden)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        chosen = gradient.nonzero().squeeze(1)
        on_chosen, on_weight, on_bias = [], None, None
        *_, gathered = ctx.settings
        with gathered(weight, bias):
            head = LMHead(hidden[chosen], weight, bias, *ctx.settings).cast(ctx.dtype)
            if needs_weight:
                on_weight = gradient.new_zeros(weight.shape)
            if needs_bias:
                on_bias = gradient.new_zeros(bias.shape)
            for part, above in zip(head.parts(head.hidden), head.parts(gradient[chosen]), strict=True):
                with torch.enable_grad():
                    projected = head.project(part).requires_grad_()
                    values = ctx.compute(head.logits(projected))
                (slope,) = torch.autograd.grad(values, projected, above)
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
