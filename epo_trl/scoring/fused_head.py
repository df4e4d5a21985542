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

from epo_trl.changed import changed
from epo_trl.methods.lm_head import LMHead

_Result = TypeVar("_Result")


def compact_scoring() -> AbstractContextManager[None]:
    """Makes TRL's fused LM head skip unlabelled positions on every device; most positions here are unlabelled.

    TRL skips them only on Triton devices, and uses the patched name in `trl.trainer.utils` only for this choice.
    """
    return changed(trl_utils, _use_triton=lambda device: True)


@contextmanager
def at_head(compute: Callable[[LMHead], _Result]) -> Iterator[list[_Result]]:
    """Calls `compute` in each forward with `fused_lm_head=True` and yields the list of its results.

    Inside `compact_scoring` it gets the head's input at the labelled positions, row by row.
    """
    found: list[_Result] = []
    original = trl_utils._ChunkedLogProbFunction

    def apply(*args: Any) -> Any:
        hidden, weight, bias, _, temperature, _, softcap, scale, *_ = args
        gathered = trl_utils.maybe_gather_lm_head_ctx
        found.append(compute(LMHead(hidden, weight, bias, temperature, softcap, scale, gathered)))
        return original.apply(*args)

    with changed(trl_utils, _ChunkedLogProbFunction=SimpleNamespace(apply=apply)):
        yield found
