"""The reference policy, for the methods that use its nucleus or hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import use_adapter

from epo_trl.trainers.batches import row_ids
from epo_trl.trainers.scoring.turn_layout import TurnLayout


@contextmanager
def keeping_reference(trainer: Any, args: Any) -> Iterator[None]:
    """Makes TRL's `__init__` create its reference model for the methods, even without a KL term.

    TRL creates one, or a copy of a loaded adapter, only if `beta` is not 0 at that point.

    Args:
        trainer: An `EPOTrainer`, in its `__init__`.
        args: Its configuration.
    """
    if args.beta or not trainer.methods.readers_of_reference:
        yield
        return
    args.beta = 1.0
    try:
        yield
        trainer.beta = 0.0
    finally:
        args.beta = 0.0


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

    Args:
        trainer: An `EPOTrainer`.
        output: TRL's batch.
        layout: Layout of its rows.
    """
    cut = trainer.methods.cut
    if cut is None:
        return {}
    ids = row_ids(output)
    with reference_model(trainer) as reference:
        size = trainer.args.per_device_train_batch_size
        return {"candidates": trainer.scorer.nucleus(reference, ids, layout, size, cut)}
