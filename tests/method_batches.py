"""Batches made by hand for methods that shape advantages, on one rank and cut over two."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from epo_trl.methods import Batch, Comm, Method, ModifiedAdvantages


def batch_of(turn_ids: Any, **others: Any) -> Batch:
    """Returns a batch of (B, T) `turn_ids`, -1 on padding; other fields as lists, the mask everywhere but there."""
    ids = torch.tensor(turn_ids)
    given = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in others.items()}
    rewards = torch.zeros(len(ids), int(ids.max()) + 1)
    fields = {"group_ids": torch.zeros(len(ids)).long(), "mask": (ids >= 0).long(), **given}
    return Batch((), turn_rewards=rewards, group_advantages=rewards[:, 0], turn_ids=ids, **fields)


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
        turn_ids.tolist(), mask=mask, logps=logps, entropy=entropy, top_p_entropy=inside, group_ids=groups,
        rl_step=rl_step, total_rl_steps=9,
    )  # fmt: skip


def on_two_ranks(method: Method, advantages: Tensor, batch: Batch, cut: int) -> list[ModifiedAdvantages]:
    """Returns what `modify_advantages` makes of the first `cut` rows and of the others, each on a rank of its own."""
    barrier, shared, shaped = threading.Barrier(2, timeout=20), [None, None], [None, None]

    def exchange(rank: int, mine: Any) -> list[Any]:
        shared[rank] = mine
        barrier.wait()
        both = list(shared)
        barrier.wait()
        return both

    def run(rank: int) -> None:
        rows = slice(0, cut) if rank == 0 else slice(cut, None)
        ranks = Comm(
            sum=lambda x: sum(exchange(rank, x)), gather=lambda x: sum(exchange(rank, x), []), index=rank, count=2
        )
        names = ("group_ids", "turn_rewards", "group_advantages", "turn_ids", "mask", "logps", "entropy")
        parts = {name: getattr(batch, name)[rows] for name in (*names, "top_p_entropy")}
        shaped[rank] = method.modify_advantages(advantages[rows], replace(batch, ranks=ranks, **parts))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(shaped), "a rank has failed"
    return shaped


def check_two_ranks(method: Method, *, cut: int = 4) -> Tensor:
    """Checks that two ranks give the result of one; returns the advantages of a random batch."""
    advantages, batch = random_batch()
    whole = method.modify_advantages(advantages, batch)
    parts = on_two_ranks(method, advantages, batch, cut)
    torch.testing.assert_close(torch.cat([part.advantages for part in parts]), whole.advantages)
    for name, mark in whole.token_annotations.items():
        torch.testing.assert_close(torch.cat([part.token_annotations[name] for part in parts]), mark)
    for part in parts:
        assert part.metrics.keys() == whole.metrics.keys()
        for name, value in whole.metrics.items():
            assert abs(part.metrics[name] - value) < 1e-9, name
    return whole.advantages
