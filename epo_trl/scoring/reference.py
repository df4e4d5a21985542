"""What methods use of the reference policy: its nucleus, and its hidden states of each turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import use_adapter

from epo_trl.devices import to_device
from epo_trl.methods import Need
from epo_trl.methods.turn_features import TurnFeatures
from epo_trl.models.critic import causal_lm
from epo_trl.objectives.gae import turn_edges
from epo_trl.scoring.fused_head import compact_scoring
from epo_trl.scoring.row_scorer import row_ids
from epo_trl.scoring.turn_layout import TurnBatch, TurnLayout, cut_turns


@contextmanager
def reference_model(trainer: Any) -> Iterator[Any]:
    """Yields the reference model of TRL's KL term: a separate model, or the policy without its new adapter."""
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    policy = trainer.accelerator.unwrap_model(trainer.model)
    with use_adapter(policy, "ref" if "ref" in policy.peft_config else None):
        yield trainer.model


@torch.no_grad()
def find_candidates(trainer: Any, output: dict[str, Any], layout: TurnLayout) -> dict[str, Tensor]:
    """Returns the entry `candidates` of TRL's batch, if a method needs it: (B, T, K) token ids, padded with -1.

    They are the tokens whose probability under the reference policy exceeds the methods' `cut`. Collective under
    ZeRO-3.
    """
    cut = trainer.methods.cut
    if cut is None:
        return {}
    ids = row_ids(output)
    with reference_model(trainer) as reference:
        return {"candidates": trainer.scorer.nucleus(reference, ids, layout, cut)}


@torch.no_grad()
def extract_features(trainer: Any, output: dict[str, Any], layout: TurnLayout) -> TurnFeatures | None:
    """Returns the features of the turns of TRL's batch if a method needs them. Collective under ZeRO-3."""
    if not trainer.methods.need(Need.FEATURES):
        return None
    ids = row_ids(output)
    size, turns = trainer.args.per_device_train_batch_size, int(layout.turn_ids.max()) + 1
    parts = []
    with reference_model(trainer) as reference:
        backbone = causal_lm(trainer.accelerator.unwrap_model(reference)).base_model
        for start in range(0, len(ids), size):
            rows = layout.rows(start, start + size)
            cut = cut_turns(ids[start : start + size], rows)
            with trainer.accelerator.autocast():
                hidden = last_hidden_states(reference, backbone, cut.input_ids)
            parts.append(turn_features(hidden, cut, rows, turns))
    states, actions, turn_mask = (torch.cat(part) for part in zip(*parts, strict=True))
    return TurnFeatures(states, actions, turn_mask)


def last_hidden_states(model: Any, backbone: torch.nn.Module, input_ids: Tensor) -> Tensor:
    """Returns the (N, L, D) inputs of the LM head in float32. The head itself gets no token, so no logit is computed.

    Args:
        model: A model with TRL's fused LM head.
        backbone: The part of the model before the head.
        input_ids: (N, L) token ids, right-padded.
    """
    hidden_states: list[Tensor] = []
    hook = backbone.register_forward_hook(lambda module, args, out: hidden_states.append(out.last_hidden_state))
    try:
        with compact_scoring():
            model(input_ids=input_ids, labels=torch.full_like(input_ids, -100), fused_lm_head=True)
    finally:
        hook.remove()
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
