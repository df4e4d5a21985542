"""Statistics and turn features of the reference policy, for the methods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor
from trl.trainer.utils import use_adapter

from epo_trl.devices import to_device
from epo_trl.objectives.gae import turn_edges
from epo_trl.scoring.fused_head import compact_scoring
from epo_trl.scoring.turn_layout import TurnBatch, TurnLayout


@contextmanager
def reference_model(policy: Any, separate: Any) -> Iterator[Any]:
    """Yields the reference model of TRL's KL term: a separate model, or the policy without its new adapter."""
    if separate is not None:
        yield separate
        return
    inner = extract_model_from_parallel(policy)
    with use_adapter(inner, "ref" if "ref" in inner.peft_config else None):
        yield policy


def last_hidden_states(model: Any, backbone: torch.nn.Module, input_ids: Tensor) -> Tensor:
    """Returns the (N, L, D) inputs of the LM head in float32. The head itself gets no token, so no logit is computed.

    Args:
        model: A model with TRL's fused LM head.
        backbone: The part of the model before the head.
        input_ids: (N, L) token ids, right-padded.
    """
    hidden_states: list[Tensor] = []
    hook = backbone.register_forward_hook(lambda module, args, out: hidden_states.append(out.last_hidden_state))
    with hook, compact_scoring():
        model(input_ids=input_ids, labels=torch.full_like(input_ids, -100), fused_lm_head=True)
    return hidden_states[0].float()


def turn_features(hidden: Tensor, batch: TurnBatch, layout: TurnLayout, turns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the fields of `TurnFeatures`.

    Args:
        hidden: (N, L, D) hidden states of the sequences of `batch`.
        batch: Batch with the turns of B rows.
        layout: Layout of the B rows.
        turns: K.
    """
    sampled = layout.sampled
    rows, columns = sampled.nonzero(as_tuple=True)
    cells = rows * turns + layout.turn_ids[rows, columns].long()  # index of each sampled token's turn
    first, _ = turn_edges(layout.turn_ids, sampled)
    shape = (len(sampled) * turns, hidden.shape[2])
    counts = torch.bincount(cells, minlength=shape[0])
    cells, begins, counts = (to_device(x, hidden.device) for x in (cells, first[sampled].nonzero().squeeze(1), counts))
    before = hidden[batch.sequence[begins], batch.position[begins] - 1]
    states = hidden.new_zeros(shape).index_copy_(0, cells[begins], before)
    actions = hidden.new_zeros(shape).index_add_(0, cells, hidden[batch.sequence, batch.position])
    actions = actions / counts.clamp(min=1).unsqueeze(1)
    as_rows = (len(sampled), turns, -1)
    return states.view(as_rows), actions.view(as_rows), (counts > 0).view(as_rows[:2])
