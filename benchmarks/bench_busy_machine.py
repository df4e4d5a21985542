"""The cost of another program on the machine: rollout and update of the tiny model, alone and beside a busy process.

    python benchmarks/bench_busy_machine.py --rounds 5
    taskset -c 0,1 python benchmarks/bench_busy_machine.py --threads 2

torch's threads wait for each other in three ways: `spinning`, OpenMP's default; `sleeping`, as this package sets it;
and one thread, which never waits. Each runs alone and beside a busy process, in turns. With as many threads as cores, a
fair share for the busy process is half of one core.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import torch
from harness import Work, measure, parser, table, write

from epo_trl.models import build_model, build_tokenizer
from epo_trl.models.generate import SamplingPolicy

ONE = {"OMP_NUM_THREADS": "1"}
SPINNING = {"GOMP_SPINCOUNT": "300000"}  # GNU's default; without a setting, epo_trl sets `sleeping`
WAYS = {"spinning": SPINNING, "sleeping": {"OMP_WAIT_POLICY": "passive"}, "one thread": ONE}
WORDS = [f"w{a}{b}" for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcdefghij"]


def make(busy: bool) -> Work:
    """Builds a small RL step: 64 prompts are answered, and the model is updated on 64 rows of 140 tokens."""
    tokenizer = build_tokenizer([" ".join(WORDS), "drawer 12 mug 3 cabinet 20"])
    model = build_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    ids = torch.randint(8, len(tokenizer), (64, 140), generator=torch.Generator().manual_seed(0))
    policy = SamplingPolicy(model, tokenizer, max_new_tokens=12)

    def step() -> int:
        policy(ids[:, :120].tolist())
        for rows in ids.split(8):
            model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.get_num_threads()

    def beside() -> int:
        other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            return step()
        finally:
            other.kill()
            other.wait()

    return beside if busy else step


def main() -> None:
    """Runs the benchmark and prints a table."""
    args = parser(__doc__)
    args.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the first two ways")
    given = args.parse_args()
    variants = {(way, busy): partial(make, busy) for way in WAYS for busy in (False, True)}
    environ = {(way, busy): {"OMP_NUM_THREADS": str(given.threads)} | WAYS[way] for way, busy in variants}
    found = measure(variants, given.rounds, environ=environ)
    fastest = min(one.median for (_, busy), one in found.items() if not busy)
    rows = []
    for way in WAYS:
        alone, beside = found[way, False], found[way, True]
        threads = alone.results[0]
        rows.append([
            way, threads, f"{alone.median:.2f} s", f"{alone.median / fastest:.2f}x", f"{beside.median:.2f} s",
            f"{beside.median / alone.median:.2f}x",
        ])  # fmt: skip
    print(table(["threads wait", "threads", "alone", "against the fastest", "beside a busy process", "cost"], rows))
    print(f"\nother work on the machine: load {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    measured = {f"{way}, {'beside' if busy else 'alone'}": one for (way, busy), one in found.items()}
    write(given.json, options=vars(given), **measured)


if __name__ == "__main__":
    main()
