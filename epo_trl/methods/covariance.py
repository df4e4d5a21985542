"""Clip-Cov and KL-Cov (arXiv 2505.22617): tokens whose advantage goes together with their log-probability.

They are the tokens that take entropy away. Both methods choose some of them when a batch is collected, over all ranks.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from epo_trl.methods.base import Batch, Method, MicroBatch, Need, Shaped
from epo_trl.methods.token_statistics import lowest, token_moments, token_share


def rounding_nats(dtype: torch.dtype) -> float:
    """Returns the largest difference of log-probabilities, in nats, that two passes of one policy may owe to rounding.

    The head rounds every logit to `dtype`, so that a logit of up to 8 may differ by `8 * eps` from pass to pass: 0.0625
    in bfloat16, 0.0078 in float16. Measured in bfloat16: at most 0.044 against float32. In float32 the order of the
    sums in the layers before it matters more, and 1e-4 covers that.

    Args:
        dtype: What the logits are computed in.
    """
    return max(1e-4, 8 * torch.finfo(dtype).eps)


def covariances(advantages: Tensor, batch: Batch) -> Tensor:
    """Returns (B, T) `(A - mean A) * (log pi - mean log pi)`, with means over the counted tokens of all ranks."""
    assert batch.logps is not None
    mean, _ = token_moments(advantages, batch)
    mean_logp, _ = token_moments(batch.logps, batch)
    return (advantages.double() - mean) * (batch.logps.double() - mean_logp)


def _number(share: float, batch: Batch) -> int:
    """Returns how many of the counted tokens of all ranks that is: at least one, and none for 0."""
    tokens = int(batch.ranks.sum(batch.mask.sum()))
    return min(tokens, max(1, int(share * tokens))) if share else 0


def _check_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"share: got {share}, takes a number from 0 to 1")


@dataclass
class ClipCov(Method):
    """Takes some tokens with a high covariance out of the policy loss.

    Of the tokens whose covariance lies between `low` and `high` as many as `share` of all tokens, at least one, are
    drawn at random, and their advantage is 0. The draw depends on the run's seed, the RL step and the episode's place
    in the batch alone: it does not depend on the number of ranks, and a resumed run repeats it.

    Args:
        share: Of the tokens of a batch. The paper's 2e-4. 0 takes none out.
        low: The authors' 1.
        high: The authors' 5.
        seed: Of the run.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.SCORES})
    config_fields: ClassVar[tuple[str, ...]] = ("seed",)

    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_share(self.share)
        if not 0 <= self.low < self.high:
            raise ValueError(f"low, high: got {self.low} and {self.high}, takes numbers with 0 <= low < high")

    def described(self) -> str:
        """Returns name and paper."""
        return f"[Clip-Cov](https://arxiv.org/abs/2505.22617), share {self.share:g}"

    def shape(self, advantages: Tensor, batch: Batch) -> Shaped:
        """Returns the advantages with those of the drawn tokens at 0."""
        covariance = covariances(advantages, batch)
        candidates = (covariance > self.low) & (covariance < self.high) & batch.mask.bool()
        drawn = lowest(self._keys(batch), candidates, _number(self.share, batch), batch)
        metrics = {
            "clip-cov/candidates": token_share(candidates, batch),
            "clip-cov/clipped": token_share(drawn, batch),
        }
        return Shaped(advantages.masked_fill(drawn, 0.0), metrics=metrics)

    def _keys(self, batch: Batch) -> Tensor:
        """Returns (B, T) random numbers, for each episode of the batch its own, whichever rank it is on."""
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

    As many as `share` of all tokens, at least one. The policy loss itself stays TRL's. The term carries gradient. It is
    0 as long as pi is pi_old, so an update has to fall inside of some batch. A distance that rounding alone can make
    (`rounding_nats`) is 0 too: its sign is random, and the gradient of a distance is as large near 0 as far from it.

    Args:
        share: Of the tokens of a batch. The paper's 0.002 for a model of 7B parameters; it has 0.0002 for one of 32B. 0
            marks none.
        coefficient: The paper's 1.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.SCORES})

    share: float = 2e-3
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        _check_share(self.share)
        if not 0 <= self.coefficient < math.inf:
            raise ValueError(f"coefficient: got {self.coefficient}, takes a number >= 0")

    def described(self) -> str:
        """Returns name and paper."""
        paper = "[KL-Cov](https://arxiv.org/abs/2505.22617)"
        return f"{paper}, share {self.share:g}, coefficient {self.coefficient:g}"

    def check(self, args: Any) -> None:
        """Refuses a run in which the term would always be 0."""
        if args.gradient_accumulation_steps % args.micro_steps_per_rl_step == 0:
            raise ValueError(
                f"num_iterations: got {args.num_iterations} with steps_per_generation={args.steps_per_generation} and "
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}, so that there is no update inside of "
                "a batch, and the penalty of 'kl-cov' is 0; takes num_iterations * steps_per_generation > "
                "gradient_accumulation_steps"
            )

    def shape(self, advantages: Tensor, batch: Batch) -> Shaped:
        """Leaves the advantages and marks tokens."""
        marked = lowest(-covariances(advantages, batch), batch.mask.bool(), _number(self.share, batch), batch)
        return Shaped(advantages, {"marked": marked}, {"kl-cov/marked": token_share(marked, batch)})

    def loss(self, micro: MicroBatch) -> Tensor | None:
        """Returns the penalty."""
        if not (self.share and self.coefficient):
            return None
        distance = (micro.logps - micro.old_logps).abs()
        held = micro.marks["marked"] & (distance > rounding_nats(micro.compute_dtype))
        return self.coefficient * micro.policy_mean(torch.where(held, distance, 0.0))
