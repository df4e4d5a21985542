"""Forward passes of an update: by tokens, and by a fixed number of buckets an episode, as it was before.

    python benchmarks/bench_passes.py             # passes, their tokens and padding, for the one-GPU recipe
    python benchmarks/bench_passes.py --times     # seconds of a micro-batch on this device, by tokens_per_pass

64 episodes of 4, 15 and 50 turns, prompts of about 700 tokens and responses of 64. Below some 16,000 tokens a pass of a
0.5B model takes the same time on an H200, whatever is in it (docs/performance.md).
"""

from __future__ import annotations

from functools import partial

import torch
from bench_update import make, make_episodes
from harness import measure, parser, table, write

from epo_trl.trainers.config import CPU_TOKENS, GPU_TOKENS
from epo_trl.trainers.scoring.turn_forward import Passes

EPISODES, BUCKETS = 64, 4
SIZES = {
    "vocab_size": 16384, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def by_buckets(lengths: list[int]) -> list[list[int]]:
    """Returns the lengths of the turns of each pass, with a fixed number of passes an episode."""
    parts = torch.tensor(sorted(lengths)).tensor_split(BUCKETS)
    return [part.tolist() or [min(lengths)] for part in parts]


def by_tokens(lengths: list[int], limit: int) -> list[list[int]]:
    """Returns the lengths of the turns of each pass of at most so many tokens."""
    ordered, passes = sorted(lengths, reverse=True), []
    for size in Passes(limit).sizes(ordered):
        passes.append(ordered[:size])
        ordered = ordered[size:]
    return passes


def count(turns: int, micro_batch: int, limit: int) -> list[list[object]]:
    """Returns a row for each way, of the update on 64 episodes."""
    episodes = make_episodes(EPISODES, turns, 700, 64, 1000)
    lengths = [[len(t.prompt_ids) + len(t.response_ids) for t in episode.turns] for episode in episodes]
    together = [sum(lengths[i : i + micro_batch], []) for i in range(0, EPISODES, micro_batch)]
    ways = {
        f"1 episode, {BUCKETS} buckets": [part for one in lengths for part in by_buckets(one)],
        f"{micro_batch} episodes, {limit:,} tokens": [part for some in together for part in by_tokens(some, limit)],
    }
    rows: list[list[object]] = []
    for way, passes in ways.items():
        real, padded = sum(map(sum, passes)), sum(len(part) * max(part) for part in passes)
        rows.append([turns, way, len(passes), f"{padded / len(passes):,.0f}", f"{padded / real - 1:.1%}"])
    return rows


def main() -> None:
    """Counts, and with `--times` measures."""
    args = parser(__doc__)
    args.add_argument("--turns", type=int, nargs="+", default=[4, 15, 50])
    args.add_argument("--micro-batch", type=int, default=2, help="episodes of a micro-batch (default: the recipe's)")
    args.add_argument("--limit", type=int, default=GPU_TOKENS, help="tokens_per_pass")
    args.add_argument("--times", action="store_true")
    given = args.parse_args()
    rows = [row for turns in given.turns for row in count(turns, given.micro_batch, given.limit)]
    print(table(["turns", "passes by", "passes", "tokens of a pass", "padding"], rows))
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
