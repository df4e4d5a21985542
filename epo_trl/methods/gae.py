"""PPO's credit (arXiv 1707.06347): generalized advantage estimation with a critic, on four views of an episode."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epo_trl.bounds import Share
from epo_trl.methods.base import Batch, Credit, Method, Need
from epo_trl.methods.token_statistics import on_tokens
from epo_trl.objectives.gae import generalized_advantages, rewards_to_go, turn_edges


@dataclass
class _GAE(Method):
    """Base class. The settings are the fields of `EPOPPOConfig` with the same names."""

    card = "[PPO](https://arxiv.org/abs/1707.06347) with a critic"
    needs = {Need.VALUES}
    config_fields = ("gamma", "gae_lambda")

    gamma: float = 1.0
    gae_lambda: float = 1.0

    def _credit(self, batch: Batch, points: Tensor, advantages: Tensor, outcomes: Tensor) -> Credit:
        """Returns one advantage per decision point, whose value is regressed to `advantage + value`."""
        return Credit(advantages, torch.where(points, advantages + batch.values, 0.0), points, outcomes)

    def _over_episodes(self, batch: Batch, points: Tensor) -> Credit:
        """Returns advantages over one chain per episode. Each turn is rewarded at its last decision point."""
        _, last_of_turn = turn_edges(batch.turn_ids, points)
        advantages = generalized_advantages(
            torch.where(last_of_turn, on_tokens(batch.turn_rewards, batch), 0.0),
            batch.values,
            points,
            points & (points.flip(1).cumsum(1).flip(1) == 1),
            batch.final_values.unsqueeze(1).expand_as(batch.values),
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )
        return self._credit(batch, points, advantages, self._outcomes(batch, points, batch.turn_rewards))

    def _outcomes(self, batch: Batch, points: Tensor, turn_rewards: Tensor, *, chained: bool = True) -> Tensor:
        """Returns (B, K) rewards-to-go from the first decision point of each turn, discounted from point to point.

        They equal the advantages with lambda 1 and a critic that is 0 everywhere, also at the end of a truncated
        episode. `turn_rewards` are (B, K), each at a turn's last point. `chained` adds the rewards of later turns.
        """
        rewards = turn_rewards.double()
        count = torch.zeros_like(rewards).scatter_add(1, batch.turn_ids.clamp(min=0).long(), points.double())
        decided = count > 0
        paid = torch.where(decided, self.gamma ** (count - 1).clamp(min=0) * rewards, 0.0)
        discounts = torch.where(decided, self.gamma**count, 1.0) * chained
        return torch.where(decided, rewards_to_go(paid, discounts), torch.nan)


@dataclass
class TurnGAE(_GAE):
    """GAE from turn to turn, as in ArCHer (arXiv 2402.19446).

    A turn is one decision, made at its first response token; all its tokens share its advantage.
    """

    def credit(self, batch: Batch) -> Credit:
        first, _ = turn_edges(batch.turn_ids, batch.mask)
        credit = self._over_episodes(batch, first)
        per_turn = torch.zeros_like(batch.turn_rewards, dtype=credit.advantages.dtype)
        per_turn.scatter_add_(1, batch.turn_ids.clamp(min=0), credit.advantages)  # one token per turn is nonzero
        return replace(credit, advantages=on_tokens(per_turn, batch) * batch.mask)


@dataclass
class TokenGAE(_GAE):
    """GAE over all response tokens of the episode, skipping the environment's tokens between them.

    A turn's reward is placed on its last token.
    """

    def credit(self, batch: Batch) -> Credit:
        return self._over_episodes(batch, batch.mask.bool())


@dataclass
class OutcomeGAE(_GAE):
    """GAE within each turn, with the episode's whole reward on the turn's last token; nothing passes between turns.

    This is the computation of EPO's release, for comparison. It does not bootstrap, so `final_values` is ignored.
    """

    def credit(self, batch: Batch) -> Credit:
        points = batch.mask.bool()
        _, last = turn_edges(batch.turn_ids, points)
        total = batch.turn_rewards.sum(1, keepdim=True)
        advantages = generalized_advantages(
            torch.where(last, total.expand_as(batch.values), 0.0),
            batch.values,
            points,
            last,
            torch.zeros_like(batch.values),
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )
        outcomes = self._outcomes(batch, points, total.expand_as(batch.turn_rewards), chained=False)
        return self._credit(batch, points, advantages, outcomes)


@dataclass
class VETTA(TurnGAE):
    """VETTA (October 2026): GAE over turns and, inside each turn, over its tokens, by a critic with two heads.

        A = (1 - token_weight) A_turn + token_weight A_token
        A_token_i = delta_i + token_lambda A_token_i+1,   delta_i = U_i+1 - U_i,   U_1 = 0,   U_n+1 = A_turn

    A_turn is `TurnGAE`'s, from the first head V at the end of each observation. The second head U learns what the
    tokens of a turn so far add to V. Only a summary of the source was known: docs/ppo.md says what is ours.

    Args:
        token_weight: Weight of A_token. With 0 there is no second head, and the credit is `turn`, bit for bit.
        token_lambda: lambda of GAE from token to token. With 1, `A_token_i = A_turn - U_i`.
    """

    card = "VETTA, [PPO](https://arxiv.org/abs/1707.06347) with a critic of two heads"

    token_weight: Share = 1.0
    token_lambda: Share = 1.0

    def credit(self, batch: Batch) -> Credit:
        turns = super().credit(batch)
        if not self.token_weight:
            return turns
        assert turns.returns is not None
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
            torch.where(inside, tokens + values, turns.returns),
            points,
            turns.outcomes,
            torch.where(points, per_token, 0.0).to(values.dtype),
        )
