"""Clip_B and Clip_V (arXiv 2602.03392): penalised tokens whose update would lower the entropy most.

Raising the logit of a token with probability p changes the entropy H by about `-S`, with `S = p (H + log p)` (Theorem
3.2). Penalising an unlikely token lowers its logit, and S is negative: the entropy falls. Both methods select such
tokens at collection, over all ranks, and set their advantage to 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from epo_trl.bounds import NonNegative, Share
from epo_trl.methods.base import Batch, Method, ModifiedAdvantages, Need
from epo_trl.methods.token_statistics import lowest, number_of_tokens, token_moments, token_share


def discriminators(batch: Batch) -> Tensor:
    """Returns (B, T) `S = p (H + log p)` of the sampled tokens, float64: p their probability, H the entropy in nats."""
    logps = batch.logps.double()
    return logps.exp() * (batch.entropy.double() + logps)


def mean_discriminator(logits: Tensor) -> Tensor:
    """Returns (n,) means of p (H + log p) over the distributions of (n, V) logits, `sum of p^2 (H + log p)`."""
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1, keepdim=True)
    return (p.square() * (entropy + log_p)).sum(-1)


@dataclass
class ClipB(Method):
    """Removes the penalised tokens with `S - mean S < -mu std S`, normalised over the counted tokens of the batch.

    Args:
        mu: Number of standard deviations below the mean from which a token is removed. The authors use 2.5.
    """

    card = "[Clip_B](https://arxiv.org/abs/2602.03392), mu {mu:g}"
    needs = {Need.SCORES}

    mu: NonNegative = 2.5

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> ModifiedAdvantages:
        values = discriminators(batch)
        mean, std = token_moments(values, batch)
        removed = batch.mask.bool() & (advantages < 0) & (values - mean < -self.mu * std)
        metrics = {"clip-b/removed": token_share(removed, batch)}
        return ModifiedAdvantages(advantages.masked_fill(removed, 0.0), metrics=metrics)


@dataclass
class ClipV(Method):
    """Removes the penalised tokens with `D > mu std D`, where `D = E[S] - S`.

    E[S] is the mean of p (H + log p) under the policy, `sum of p^2 (H + log p)` over the vocabulary. The deviation is
    that of the counted tokens of the batch.

    Args:
        mu: Number of standard deviations from which a token is removed. The authors use 8.5.
        max_share: Fraction of the batch's tokens, at least one, of which those with the largest D are removed. The
            authors use 1e-4. 0 removes none.
    """

    card = "[Clip_V](https://arxiv.org/abs/2602.03392), mu {mu:g}, at most {max_share:g} of the tokens"
    needs = {Need.SCORES}
    statistics = {"mean": lambda head, _: head.map(mean_discriminator)}

    mu: NonNegative = 8.5
    max_share: Share = 1e-4

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> ModifiedAdvantages:
        excess = batch.statistics["mean"].double() - discriminators(batch)
        _, std = token_moments(excess, batch)
        candidates = batch.mask.bool() & (advantages < 0) & (excess > self.mu * std)
        removed = lowest(-excess, candidates, number_of_tokens(self.max_share, batch), batch)
        metrics = {"clip-v/candidates": token_share(candidates, batch), "clip-v/removed": token_share(removed, batch)}
        return ModifiedAdvantages(advantages.masked_fill(removed, 0.0), metrics=metrics)
