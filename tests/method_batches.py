"""Batches made by hand for methods, on one rank and cut over two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from epo_trl.methods import Batch, Comm, Method, MicroBatch, ModifiedAdvantages, TokenScores
from epo_trl.types import Episode, StopReason, Turn


def batch_of(turn_ids: Any, *, logps: Any = None, entropy: Any = None, statistics: Any = None, **others: Any):
    """Returns a batch of (B, T) `turn_ids`, -1 on padding; other fields as lists, the mask everywhere but there.

    Scores under the behaviour policy are NaN where nothing is given.
    """
    ids = torch.tensor(turn_ids)
    given = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in others.items()}
    rewards = torch.zeros(len(ids), int(ids.max()) + 1)
    fields = {"group_ids": torch.zeros(len(ids)).long(), "mask": (ids >= 0).long(), **given}
    unknown = torch.full(ids.shape, torch.nan)
    scores = TokenScores(
        *(unknown if x is None else torch.as_tensor(x) for x in (logps, entropy)),
        {name: torch.as_tensor(x) for name, x in (statistics or {}).items()},
    )
    return Batch((), turn_rewards=rewards, group_advantages=rewards[:, 0], turn_ids=ids, scores=scores, **fields)


def micro_of(turn_ids: Any, *, num_episodes: float = 1.0, **fields: Any) -> MicroBatch:
    """Returns a micro-batch of (b, T) `turn_ids`, -1 on padding; NaN and a mask everywhere but there by default."""
    ids = torch.as_tensor(turn_ids)
    unknown = dict.fromkeys(("logps", "entropy", "old_logps", "advantages"), torch.full(ids.shape, torch.nan))
    given = {"turn_ids": ids, "mask": (ids >= 0).long(), "policy_mean": torch.sum, **fields}
    return MicroBatch(**{**unknown, **given}, num_episodes=torch.tensor(num_episodes))


def record_calls(owner: Any, name: str) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns the list to which each call of a method from now on adds its arguments and its result."""
    calls, original = [], getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, original(*args, **kwargs)))
        return calls[-1][1]

    setattr(owner, name, call)
    return calls


def random_batch(rows: int = 8, width: int = 12, *, rl_step: int = 0) -> tuple[Tensor, Batch]:
    """Returns (B, T) advantages and a batch of two groups of four; turns of random lengths, one row without a token."""
    generator = torch.Generator().manual_seed(0)
    turn_ids = torch.randint(0, 2, (rows, width), generator=generator).cumsum(1)
    turn_ids = turn_ids - turn_ids[:, :1]
    lengths = torch.randint(3, width + 1, (rows, 1), generator=generator)
    turn_ids = torch.where(torch.arange(width) < lengths, turn_ids, -1)
    mask = (turn_ids >= 0).long()
    mask[2] = 0
    advantages = torch.randn(rows, width, generator=generator) * mask
    logps = -3 * torch.rand(rows, width, generator=generator) * mask
    entropy = 2 * torch.rand(rows, width, generator=generator) * mask
    inside = 0.6 * entropy.flip(1) * mask
    groups = torch.arange(rows) // 4
    return advantages, batch_of(
        turn_ids.tolist(), mask=mask, logps=logps, entropy=entropy, group_ids=groups, rl_step=rl_step, total_rl_steps=9,
        statistics={"entropy": inside, "mean": 0.3 * logps.flip(1)},
    )  # fmt: skip


def run_on_ranks(call: Callable[[int, Comm], Any], count: int = 2) -> list[Any]:
    """Calls `call(rank, comm)` for each rank, each in a thread of its own, and returns the results by rank."""
    barrier, shared = threading.Barrier(count, timeout=20), [None] * count

    def exchange(rank: int, mine: Any) -> list[Any]:
        shared[rank] = mine
        barrier.wait()
        every = list(shared)
        barrier.wait()
        return every

    def run(rank: int) -> Any:
        ranks = Comm(
            sum=lambda x: sum(exchange(rank, x)), gather=lambda x: sum(exchange(rank, x), []), index=rank, count=count
        )
        return call(rank, ranks)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count), timeout=60))


def check_two_ranks(method: Method, *, cut: int = 4) -> Tensor:
    """Checks that two ranks give the result of one; returns the advantages of a random batch."""
    advantages, batch = random_batch()

    def modify(rank: int, ranks: Comm) -> ModifiedAdvantages:
        rows = slice(0, cut) if rank == 0 else slice(cut, None)
        names = ("group_ids", "turn_rewards", "group_advantages", "turn_ids", "mask")
        parts = {name: getattr(batch, name)[rows] for name in names}
        statistics = {name: values[rows] for name, values in batch.statistics.items()}
        scores = TokenScores(batch.logps[rows], batch.entropy[rows], statistics)
        return method.modify_advantages(advantages[rows], replace(batch, ranks=ranks, scores=scores, **parts))

    whole, parts = method.modify_advantages(advantages, batch), run_on_ranks(modify)
    torch.testing.assert_close(torch.cat([part.advantages for part in parts]), whole.advantages)
    for name, mark in whole.token_annotations.items():
        torch.testing.assert_close(torch.cat([part.token_annotations[name] for part in parts]), mark)
    for part in parts:
        assert part.metrics.keys() == whole.metrics.keys()
        for name, value in whole.metrics.items():
            assert abs(part.metrics[name] - value) < 1e-9, name
    return whole.advantages


def episode_of(seen, rewards, *, won=False, stop=None, final="end", keys=None):
    """Returns an episode of one turn per observation, with two tokens each."""
    keys = keys or [""] * (len(seen) + 1)
    turns = tuple(
        Turn((1,), (2, 3), "", text, "", True, reward, state_key=key)
        for text, reward, key in zip(seen, rewards, keys, strict=False)
    )
    stop = stop or (StopReason.WON if won else StopReason.TURN_LIMIT)
    return Episode("train/0", "", "", turns, stop, won, final, final_info={"state_key": keys[-1]})


def batch_of_turns(episodes, group_ids, advantages=None, ranks=None):
    """Returns a batch of episodes whose turns have two tokens each."""
    width = max(len(e.turns) for e in episodes)
    turn_ids = torch.full((len(episodes), 2 * width), -1)
    rewards = torch.zeros(len(episodes), width)
    for i, e in enumerate(episodes):
        for k, turn in enumerate(e.turns):
            turn_ids[i, 2 * k : 2 * k + 2] = k
            rewards[i, k] = turn.reward * e.is_usable
    mask = ((turn_ids >= 0) * torch.tensor([[e.is_usable] for e in episodes])).long()
    given = torch.tensor(advantages or [0.0] * len(episodes))
    return Batch(episodes, torch.tensor(group_ids), rewards, given, turn_ids, mask, ranks or Comm())
