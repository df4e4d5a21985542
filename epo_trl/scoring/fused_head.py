"""Hooks into TRL's fused LM head: the positions that it scores, and its inputs there.

The fused head returns the log-probability of each label and the entropy over the whole vocabulary, and nothing about
other tokens. Its inputs pass through one call inside the model's forward: hidden states, the head's weight (unsharded
there, also under ZeRO-3 and FSDP), scale, soft cap and temperature. Intercepting that call gives the model's own
logits for every architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import trl.trainer.utils as trl_utils
from torch import Tensor

from epo_trl.changed import changed
from epo_trl.methods.lm_head import LMHead

_Result = TypeVar("_Result")


def compact_scoring() -> AbstractContextManager[None]:
    """Makes TRL's fused LM head skip unlabelled positions on a CPU too; most positions here are unlabelled.

    TRL skips them only on Triton devices. Its alternative keeps shapes static for compilers that need it, which a CPU
    does not. TRL uses the patched name in `trl.trainer.utils` only for this choice.
    """
    original = trl_utils._use_triton
    return changed(trl_utils, _use_triton=lambda device: device.type == "cpu" or original(device))


@contextmanager
def at_head(compute: Callable[[LMHead], _Result], scored: Tensor) -> Iterator[list[_Result]]:
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
        gathered = trl_utils.maybe_gather_lm_head_ctx
        found.append(compute(LMHead(hidden, weight, bias, temperature, softcap, scale, gathered)))
        return original.apply(*args)

    with changed(trl_utils, _ChunkedLogProbFunction=SimpleNamespace(apply=apply)):
        yield found
