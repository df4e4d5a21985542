"""GSPO's ratio (arXiv 2507.18071), one per turn: all tokens of a response are clipped together or not at all."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from epo_trl.methods.base import Method
from epo_trl.objectives import turn_means


@dataclass
class TurnGSPO(Method):
    """`s = exp(mean over the turn's tokens of log(pi / pi_old))` instead of each token's ratio.

    The gradient is that of the paper's GSPO-token: token t contributes `s * A_t * grad log pi_t`.
    """

    card = "[GSPO](https://arxiv.org/abs/2507.18071) with a ratio per turn"

    def check(self, args: Any) -> None:
        if not args.updates_within_batch:
            message = "policy_method: got 'gspo' with one update per batch: every ratio is 1; increase num_iterations"
            warnings.warn(message, stacklevel=2)

    def ratio(self, logps: Tensor, old_logps: Tensor, turn_ids: Tensor, mask: Tensor) -> Tensor:
        """Returns log-probabilities whose difference from the old ones is the mean over each turn."""
        mean = turn_means(logps.detach() - old_logps, turn_ids, mask)
        return logps + (old_logps + mean - logps.detach())
