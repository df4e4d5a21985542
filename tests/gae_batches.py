"""Batches of values and rewards, made by hand and at random, for the generalized advantage estimation."""

import math
import random

import torch

from epo_trl.methods import Batch, CriticValues
from epo_trl.methods.gae import OutcomeGAE, TokenGAE, TurnGAE

CREDITS = {"turn": TurnGAE, "token": TokenGAE, "outcome": OutcomeGAE}

# Two turns: two sampled tokens, two of the environment, two sampled, one of padding.
TURN_IDS = [0, 0, 1, 1, 1, 1, -1]
RESPONSE = [1, 1, 0, 0, 1, 1, 0]
VALUES = [1.0, 2.0, 50.0, 60.0, 3.0, 5.0, 70.0]  # 50, 60, 70 belong to no decision


def batch_of(values, final_values, **tensors) -> Batch:
    rows, critic = len(values), CriticValues(values, final_values)
    nothing = torch.full((rows,), math.nan)
    return Batch(episodes=(), group_ids=torch.arange(rows), group_advantages=nothing, critic=critic, **tensors)


def one_episode(final_value: float, rewards=(0.5, 10.0)) -> Batch:
    return batch_of(
        values=torch.tensor([VALUES], dtype=torch.float64),
        turn_rewards=torch.tensor([rewards], dtype=torch.float64),
        final_values=torch.tensor([final_value], dtype=torch.float64),
        turn_ids=torch.tensor([TURN_IDS]),
        mask=torch.tensor([RESPONSE]),
    )


def close(tensor, expected):
    torch.testing.assert_close(tensor, torch.tensor([expected], dtype=torch.float64), rtol=0, atol=1e-12)


def chain(values: list[float], rewards: list[float], end: float, gamma: float, lam: float) -> list[float]:
    """Returns the advantages of one chain by their definition, a sum over later differences, and not by recursion."""
    following = [*values, end][1:]
    deltas = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[n:])) for n in range(len(deltas))]


def random_batch(seed: int, rows: int = 6) -> Batch:
    """Returns episodes of 0 to 6 turns, turns of 1 to 4 tokens with 0 to 3 of the environment between them."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ids, masks = [], []
    for row in range(rows):
        ids.append([])
        masks.append([])
        for turn in range(rng.randrange(0, 7) if row else 0):
            prompt, response = rng.randrange(4) if turn else 0, rng.randrange(1, 5)
            ids[-1] += [turn] * (prompt + response)
            masks[-1] += [0] * prompt + [1] * response
    width = max(map(len, ids)) + 2
    pad = [width - len(row) for row in ids]
    return batch_of(
        values=torch.randn(rows, width, dtype=torch.float64, generator=generator),
        turn_rewards=torch.randn(rows, 7, dtype=torch.float64, generator=generator),
        final_values=torch.randn(rows, dtype=torch.float64, generator=generator)
        * torch.tensor([rng.random() < 0.5 for _ in range(rows)]),
        turn_ids=torch.tensor([row + [-1] * n for row, n in zip(ids, pad, strict=True)]),
        mask=torch.tensor([row + [0] * n for row, n in zip(masks, pad, strict=True)]),
    )
