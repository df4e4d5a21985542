"""Clip-Cov and KL-Cov (arXiv 2505.22617): tokens whose advantage covaries most with their log-probability.

These tokens reduce the entropy most. Both methods select some of them at collection, over all ranks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epo_trl.bounds import NonNegative, Share
from epo_trl.errors import InputError
from epo_trl.methods.base import Batch, Method, MicroBatch, ModifiedAdvantages, Need
from epo_trl.methods.token_statistics import lowest, number_of_tokens, token_moments, token_share


def rounding_nats(dtype: torch.dtype) -> float:
    """Returns an upper bound, in nats, on the rounding difference between log-probabilities of two passes.

    The LM head rounds every logit to `dtype`, so a logit of up to 8 can differ by `8 * eps` between passes: 0.0625 in
    bfloat16, 0.0078 in float16. In float32 the summation order in earlier layers matters more; 1e-4 covers it.
    """
    return max(1e-4, 8 * torch.finfo(dtype).eps)


def covariances(advantages: Tensor, batch: Batch) -> Tensor:
    """Returns (B, T) `(A - mean A) * (log pi - mean log pi)`, with means over the counted tokens of all ranks."""
    mean, _ = token_moments(advantages, batch)
    mean_logp, _ = token_moments(batch.logps, batch)
    return (advantages.double() - mean) * (batch.logps.double() - mean_logp)


@dataclass
class ClipCov(Method):
    """Removes some tokens with high covariance from the policy loss.

    Among the tokens whose covariance lies between `low` and `high`, a fraction `share` of all tokens, at least one, is
    drawn at random, and their advantage is set to 0. The draw does not depend on the number of ranks.

    Args:
        share: Fraction of the batch's tokens to remove. The paper uses 2e-4. 0 removes none.
        low: Lower bound of the covariance. The authors use 1.
        high: Upper bound of the covariance. The authors use 5.
        seed: Seed of the run.
    """

    card = "[Clip-Cov](https://arxiv.org/abs/2505.22617), share {share:g}"
    needs = {Need.SCORES}
    config_fields = ("seed",)

    share: Share = 2e-4
    low: NonNegative = 1.0
    high: NonNegative = 5.0
    seed: int = 0

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> ModifiedAdvantages:
        covariance = covariances(advantages, batch)
        candidates = (covariance > self.low) & (covariance < self.high) & batch.mask.bool()
        drawn = lowest(self._keys(batch), candidates, number_of_tokens(self.share, batch), batch)
        metrics = {"clip-cov/candidates": token_share(candidates, batch), "clip-cov/clipped": token_share(drawn, batch)}
        return ModifiedAdvantages(advantages.masked_fill(drawn, 0.0), metrics=metrics)

    def _keys(self, batch: Batch) -> Tensor:
        """Returns (B, T) random numbers, drawn per episode of the batch, independent of its rank."""
        keys = torch.ones(batch.mask.shape, dtype=torch.float64)
        first = batch.ranks.index * len(keys)
        for i, mask in enumerate(batch.mask.bool().cpu()):
            seed = random.Random(f"{self.seed}/{batch.rl_step}/{first + i}").getrandbits(63)
            generator = torch.Generator().manual_seed(seed)
            keys[i, mask] = torch.rand(int(mask.sum()), generator=generator, dtype=torch.float64)
        return keys.to(batch.mask.device)


@dataclass
class KLCov(Method):
    """Adds `coefficient * |log pi - log pi_old|` to the policy loss of the tokens with the highest covariance.

    A fraction `share` of all tokens, at least one, is selected. Distances that rounding alone can produce
    (`rounding_nats`) count as 0: their sign is random, and the gradient of a distance does not vanish near 0.

    Args:
        share: Fraction of the batch's tokens to select. The paper uses 0.002 for a 7B model and 0.0002 for a 32B model.
            0 selects none.
        coefficient: Weight of the penalty. The paper uses 1.
    """

    card = "[KL-Cov](https://arxiv.org/abs/2505.22617), share {share:g}, coefficient {coefficient:g}"
    needs = {Need.SCORES}

    share: Share = 2e-3
    coefficient: NonNegative = 1.0

    def check(self, args: Any) -> None:
        if not args.updates_within_batch:
            raise InputError(
                "num_iterations: expected num_iterations * steps_per_generation > gradient_accumulation_steps with "
                f"'kl-cov', got {args.num_iterations}: with one update per batch, the penalty is 0"
            )

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> ModifiedAdvantages:
        marked = lowest(-covariances(advantages, batch), batch.mask.bool(), number_of_tokens(self.share, batch), batch)
        return ModifiedAdvantages(advantages, {"marked": marked}, {"kl-cov/marked": token_share(marked, batch)})

    def loss(self, micro: MicroBatch) -> Tensor | None:
        if not (self.share and self.coefficient):
            return None
        distance = (micro.logps - micro.old_logps).abs()
        penalised = micro.token_annotations["marked"] & (distance > rounding_nats(micro.compute_dtype))
        return self.coefficient * micro.policy_mean(torch.where(penalised, distance, 0.0))
