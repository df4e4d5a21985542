"""GRPO's credit (arXiv 2402.03300): an episode relative to the others of its task."""

from __future__ import annotations

from dataclasses import dataclass

from epo_trl.methods.base import Batch, Credit, Method, Need


@dataclass
class GRPO(Method):
    """Assigns the episode's group-relative advantage to each of its tokens."""

    card = "[GRPO](https://arxiv.org/abs/2402.03300)"
    needs = {Need.GROUPS}

    def credit(self, batch: Batch) -> Credit:
        return Credit(batch.group_advantages.unsqueeze(1) * batch.mask)
