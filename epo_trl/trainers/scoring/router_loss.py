"""The load-balancing loss of a mixture of experts, over the tokens of the turns only.

TRL's fused head computes it in every forward pass, over all tokens if there is no attention mask. Turns are scored
without one, so the loss would include padding and passes that a rank makes only to match the others. This module
records the router outputs of each pass and computes the loss once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.models.mixtral import modeling_mixtral

# Arguments of the loss: router logits of each layer, (n * l, experts); number of experts; experts per token.
RouterOutput = tuple[tuple[Tensor, ...], int, int]


@contextmanager
def keeping_router_outputs() -> Iterator[list[RouterOutput]]:
    """Yields a list that collects the inputs of the fused head's router loss; the head's own loss is 0 meanwhile.

    The head looks up the function in `modeling_mixtral` for every model family.
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


def router_loss(outputs: Sequence[RouterOutput], counted: Sequence[Tensor]) -> Tensor:
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
