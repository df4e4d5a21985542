"""Cost of an update per episode, for many episodes of many turns, in micro-batches of four: does it scale linearly?

python benchmarks/bench_scaling.py --episodes 8 64 256 --turns 5 15 50
"""

from __future__ import annotations

from functools import partial

from bench_update import make, make_episodes
from harness import Work, measure, parser, table, write

MICRO_BATCH = 4
SIZES = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def make_all(count: int, turns: int) -> Work:
    """Builds a benchmark of forward and backward passes over all episodes. Every micro-batch is the same four."""
    episodes = make_episodes(MICRO_BATCH, turns, prompt=100, response=20, vocabulary=SIZES["vocab_size"])
    one = make("ours", episodes, SIZES)

    def work() -> None:
        for _ in range(count // MICRO_BATCH):
            one()

    return work


def main() -> None:
    """Benchmarks every combination and prints a table."""
    args = parser(__doc__)
    args.add_argument("--episodes", type=int, nargs="+", default=[8, 64, 256])
    args.add_argument("--turns", type=int, nargs="+", default=[5, 15, 50])
    given = args.parse_args()
    rows, results = [], {}
    for turns in given.turns:
        measured = measure({str(n): partial(make_all, n, turns) for n in given.episodes}, given.rounds)
        for name, one in measured.items():
            each = one.median / int(name)
            rows.append([name, turns, f"{one.median:.2f} s", f"{each * 1000:.1f} ms",
                         f"{each / turns * 1e6:,.0f} us", f"{one.peak_mb:,.0f} MB"])  # fmt: skip
        results[turns] = measured
    print(table(["episodes", "turns", "update", "an episode", "a turn", "peak memory"], rows))
    write(given.json, options=vars(given), results=results)


if __name__ == "__main__":
    main()
