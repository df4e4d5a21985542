"""The policy as it was when RL began, for the methods that ask it which tokens it would have chosen from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import use_adapter

from epo_trl.trainers.batches import rows_of
from epo_trl.trainers.turn_layout import TurnLayout


@contextmanager
def keeping_reference(trainer: Any, args: Any) -> Iterator[None]:
    """Lets TRL's `__init__` make its reference model for the methods alone, when there is no KL term.

    TRL makes one, or a copy of a loaded adapter, only if `beta` is not 0 there.

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
def reference_of(trainer: Any) -> Iterator[Any]:
    """Yields the model that TRL's KL term would compare with: another one, or the policy without its new adapter."""
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    policy = trainer.accelerator.unwrap_model(trainer.model)
    with use_adapter(policy, "ref" if "ref" in policy.peft_config else None):
        yield trainer.model


@torch.no_grad()
def candidates_of(trainer: Any, output: dict[str, Any], layout: TurnLayout) -> dict[str, Tensor]:
    """Returns `candidates` for TRL's batch if a method needs them: (B, T, K) token ids, -1 where there is none.

    They are the tokens to which the reference gives more than the methods' `cut`. Collective under ZeRO-3.

    Args:
        trainer: An `EPOTrainer`.
        output: TRL's batch.
        layout: Of its rows.
    """
    cut = trainer.methods.cut
    if cut is None:
        return {}
    ids, *_ = rows_of(output)
    with reference_of(trainer) as reference:
        size = trainer.args.per_device_train_batch_size
        return {"candidates": trainer.scorer.nucleus(reference, ids, layout, size, cut)}
