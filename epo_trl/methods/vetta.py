"""VETTA's credit (October 2026): GAE over turns and, inside each turn, over its tokens, by a critic with two heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epo_trl.bounds import Share
from epo_trl.methods.base import Batch, Credit, Need, required
from epo_trl.methods.gae import TurnGAE
from epo_trl.objectives.gae import generalized_advantages, turn_edges


@dataclass
class VETTA(TurnGAE):
    """`A = (1 - token_weight) A_turn + token_weight A_token`.

    A_turn is `TurnGAE`'s, from the first head V at the end of each observation. A_token is GAE over the tokens of one
    turn, without a discount. Only the last token is paid, with `Q - V = A_turn`: the response's value Q = V + A_turn,
    centred on the value of the state. So the second head U learns what the tokens so far add to V. It is 0 before the
    first token, and nothing passes from turn to turn.

        A_token_i = delta_i + token_lambda A_token_i+1,   delta_i = U_i+1 - U_i,   U_1 = 0,   U_n+1 = A_turn

    Of the source only a summary was known: the two heads, GAE over turns, and GAE inside a turn that is centred on the
    response's value. The response's value, the reward of the last token, the sum of both advantages, the targets of U
    (`A_token + U`) and the equal weights of both heads in the critic's loss are a reading of that summary.

    Args:
        token_weight: Weight of A_token. With 0 there is no second head, and the credit is `turn`, bit for bit.
        token_lambda: lambda of GAE from token to token. With 1, `A_token_i = A_turn - U_i`.
    """

    card = "VETTA, [PPO](https://arxiv.org/abs/1707.06347) with a critic of two heads"

    token_weight: Share = 1.0
    token_lambda: Share = 1.0

    def credit(self, batch: Batch) -> Credit:
        """Returns one advantage per token. Collective."""
        turns = super().credit(batch)
        if not self.token_weight:
            return turns
        returns = required(turns.returns, Need.VALUES)
        points = batch.mask.bool()
        first, last = turn_edges(batch.turn_ids, batch.mask)
        inside = points & ~first
        values = torch.where(inside, batch.values, 0.0)
        tokens = generalized_advantages(
            torch.where(last, turns.advantages, 0.0),
            values,
            points,
            last,
            torch.zeros_like(values),
            gamma=1.0,
            gae_lambda=self.token_lambda,
        )
        counts = batch.ranks.sum(torch.stack([first.sum(), inside.sum()]).double())
        half = counts.sum() / (counts > 0).sum().clamp(min=1)  # the heads share the tokens equally, if both have some
        per_token = torch.where(first, half / counts[0].clamp(min=1), half / counts[1].clamp(min=1))
        return Credit(
            torch.lerp(turns.advantages, tokens, self.token_weight),
            torch.where(inside, tokens + values, returns),
            points,
            turns.outcomes,
            torch.where(points, per_token, 0.0).to(values.dtype),
        )
