"""Forward passes of an update: by tokens, and by a fixed number of buckets an episode, as it was before.

    python benchmarks/bench_passes.py             # passes, their tokens and padding, for the one-GPU recipe
    python benchmarks/bench_passes.py --calls     # also calls of torch operators in the update
    python benchmarks/bench_passes.py --times     # also seconds of a micro-batch on this device, by tokens_per_pass

64 episodes of 4, 15 and 50 turns, prompts of about 700 tokens and responses of 64. Below some 16,000 tokens a pass of a
0.5B model takes the same time on an H200, whatever is in it (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from bench_update import make, make_episodes
from harness import measure, parser, table, write
from torch.utils._python_dispatch import TorchDispatchMode

from epo_trl.scoring.turn_forward import Passes
from epo_trl.trainers.config import CPU_TOKENS, GPU_TOKENS

EPISODES, BUCKETS = 64, 4
SIZES = {
    "vocab_size": 16384, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
TINY = {**SIZES, "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 24}


class Buckets(Passes):
    """A fixed number of passes for each micro-batch."""

    def sizes(self, lengths: Sequence[int]) -> list[int]:
        """Returns the number of sequences of each pass."""
        return [len(part) for part in torch.arange(len(lengths)).tensor_split(BUCKETS)]


class Calls(TorchDispatchMode):
    """Counts calls of torch operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the operator."""
        self.count += 1
        return func(*args, **kwargs or {})


def divided(lengths: list[int], passes: Passes) -> list[list[int]]:
    """Returns the lengths of the turns of each pass."""
    ordered, parts = sorted(lengths, reverse=True), []
    for size in passes.sizes(ordered):
        parts.append(ordered[:size] or ordered[-1:])
        ordered = ordered[size:] or ordered
    return parts


def count(turns: int, micro_batch: int, limit: int) -> list[list[object]]:
    """Returns a row for each way, of the update on 64 episodes."""
    episodes = make_episodes(EPISODES, turns, 700, 64, 1000)
    lengths = [[len(t.prompt_ids) + len(t.response_ids) for t in episode.turns] for episode in episodes]
    together = [sum(lengths[i : i + micro_batch], []) for i in range(0, EPISODES, micro_batch)]
    now = Passes(limit)
    ways = {
        f"1 episode, {BUCKETS} buckets": [part for one in lengths for part in divided(one, Buckets())],
        f"{micro_batch} episodes, {limit:,} tokens": [part for some in together for part in divided(some, now)],
        "the batch without gradient": divided(sum(lengths, []), now),
    }
    rows: list[list[object]] = []
    for way, passes in ways.items():
        real, padded = sum(map(sum, passes)), sum(len(part) * max(part) for part in passes)
        rows.append([turns, way, len(passes), f"{padded / len(passes):,.0f}", f"{padded / real - 1:.1%}"])
    return rows


def count_calls(turns: int, micro_batch: int, limit: int) -> list[object]:
    """Returns a row: calls of operators a trained token in the update on a micro-batch, as before and now.

    Turns and passes are a tenth as long, which changes the time and not the calls.
    """
    episodes = make_episodes(micro_batch, turns, 70, 6, 1000)
    tokens = 10 * sum(len(turn.prompt_ids) + len(turn.response_ids) for episode in episodes for turn in episode.turns)
    found = []
    for groups, passes in ([[one] for one in episodes], Buckets()), ([episodes], Passes(limit // 10, recompute=True)):
        calls = 0
        for group in groups:
            work = make("ours", group, TINY, checkpointing=passes.tokens is None, passes=passes)
            with Calls() as counter:
                work()
            calls += counter.count
        found.append(calls / tokens)
    return [turns, *(f"{calls:.2f}" for calls in found), f"{found[0] / found[1]:.1f}x"]


def main() -> None:
    """Counts, and with `--times` measures."""
    args = parser(__doc__)
    args.add_argument("--turns", type=int, nargs="+", default=[4, 15, 50])
    args.add_argument("--micro-batch", type=int, default=8, help="episodes of a micro-batch (default: the recipe's)")
    args.add_argument("--limit", type=int, default=GPU_TOKENS, help="tokens_per_pass")
    args.add_argument("--calls", action="store_true")
    args.add_argument("--times", action="store_true")
    given = args.parse_args()
    rows = [row for turns in given.turns for row in count(turns, given.micro_batch, given.limit)]
    print(table(["turns", "passes by", "passes", "tokens of a pass", "padding"], rows))
    if given.calls:
        header = ["turns", "calls a token, by buckets", "by tokens, passes run again", "fewer"]
        print(table(header, [count_calls(turns, given.micro_batch, given.limit) for turns in given.turns]))
    results = {}
    if given.times:
        limits = sorted({512, 1024, CPU_TOKENS, 4096, 8192, GPU_TOKENS})
        for turns in given.turns:
            episodes = make_episodes(8, turns, 100, 20, SIZES["vocab_size"])
            works = {f"{limit:,}": partial(make, "ours", episodes, SIZES, limit) for limit in limits}
            results[turns] = measured = measure(works, given.rounds)
            base = measured[f"{CPU_TOKENS:,}"].median
            times = [[turns, way, f"{one.median:.2f} s", f"{one.median / base:.2f}x"] for way, one in measured.items()]
            print(table(["turns", "tokens_per_pass", "time", f"time / {CPU_TOKENS:,}"], times))
    write(given.json, sizes=SIZES, options=vars(given), results=results)


if __name__ == "__main__":
    main()
