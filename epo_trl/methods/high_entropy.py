"""The policy gradient of the tokens with the highest entropy alone (arXiv 2506.01939, "Beyond the 80/20 Rule")."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from epo_trl.bounds import PositiveShare
from epo_trl.methods.base import Batch, Method, ModifiedAdvantages, Need
from epo_trl.methods.token_statistics import lowest, number_of_tokens, token_share


@dataclass
class HighEntropy(Method):
    """Sets the advantage of all tokens to 0 except the `share` with the highest entropy in the whole batch.

    The share is that of the counted tokens of all ranks, rounded down but at least one token. As in the paper, the
    other tokens still count in the mean.

    Args:
        share: Fraction of the tokens with a policy gradient. The paper uses 0.2. 1 keeps all.
    """

    card = "[high-entropy tokens](https://arxiv.org/abs/2506.01939) alone, share {share:g}"
    needs = {Need.SCORES}

    share: PositiveShare = 0.2

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> ModifiedAdvantages:
        kept = lowest(-batch.entropy, batch.mask.bool(), number_of_tokens(self.share, batch), batch)
        metrics = {"high-entropy/kept": token_share(kept, batch)}
        return ModifiedAdvantages(advantages.masked_fill(~kept, 0.0), metrics=metrics)
