"""Entropy-based advantage (arXiv 2506.14758): tokens where the policy had a choice count a little more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from epo_trl.methods.base import Batch, Method, Need, Shaped


@dataclass
class EntropyAdvantage(Method):
    """`A' = A + min(alpha * H, |A| / kappa)`, with the entropy H of the policy that played, without gradient.

    With kappa above 1 an advantage keeps its sign.

    Args:
        alpha: The paper has 0.4 with GRPO, 0.1 with PPO.
        kappa: The paper's 2.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.SCORES})

    alpha: float = 0.4
    kappa: float = 2.0

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise ValueError(f"alpha: got {self.alpha}, takes a number >= 0")
        if not self.kappa > 1:
            raise ValueError(f"kappa: got {self.kappa}, takes a number > 1, so that advantages keep their sign")

    def described(self) -> str:
        """Returns name and paper."""
        return f"[entropy-based advantages](https://arxiv.org/abs/2506.14758), alpha {self.alpha:g}"

    def shape(self, advantages: Tensor, batch: Batch) -> Shaped:
        """Returns the advantages with the bonus."""
        assert batch.entropy is not None
        return Shaped(advantages + torch.minimum(self.alpha * batch.entropy, advantages.abs() / self.kappa))
