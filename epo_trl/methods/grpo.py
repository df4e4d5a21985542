"""GRPO's credit (arXiv 2402.03300): an episode against the others of its task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from epo_trl.methods.base import Batch, Credit, Method, Need


@dataclass
class GRPO(Method):
    """Every token of an episode gets the advantage of its total reward in its group."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need.GROUPS})

    def described(self) -> str:
        """Returns name and paper."""
        return "[GRPO](https://arxiv.org/abs/2402.03300)"

    def credit(self, batch: Batch) -> Credit:
        """Returns TRL's advantages, the same for all tokens of an episode."""
        return Credit(batch.group_advantages.unsqueeze(1) * batch.mask)
