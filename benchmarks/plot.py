"""Plots the results of `make bench`: runs/bench/*.json to docs/performance.png.

python benchmarks/plot.py
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def load(folder: Path, name: str) -> dict[str, Any]:
    """Loads the results of one benchmark.

    Raises:
        SystemExit: If there are none.
    """
    path = folder / f"bench_{name}.json"
    if not path.is_file():
        raise SystemExit(f"{path} does not exist; run: python benchmarks/bench_{name}.py --json {path}")
    return json.loads(path.read_text(encoding="utf-8"))["results"]


def lines(axes: Any, results: dict[str, dict[str, Any]], value: str, base: str) -> None:
    """Plots a line for each variant over the number of turns, in multiples of the base."""
    turns = [int(key) for key in results]
    for way in results[str(turns[0])]:
        ratios = [_number(measured[way], value) / _number(measured[base], value) for measured in results.values()]
        axes.plot(turns, ratios, marker="o", label=way)
    axes.set_xlabel("turns")
    axes.set_xscale("log")
    axes.set_xticks(turns, labels=turns)
    axes.minorticks_off()
    axes.legend(fontsize=8)


def _number(one: dict[str, Any], value: str) -> float:
    return statistics.median(one["seconds"]) if value == "seconds" else one["peak_mb"]


def main() -> None:
    """Writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    parser.add_argument("--output", type=Path, default=Path("docs/performance.png"))
    given = parser.parse_args()
    update, rollout, scaling = (load(given.folder, name) for name in ("update", "rollout", "scaling"))
    figure, ((time, memory), (speed, each)) = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    lines(time, update, "seconds", "ours")
    time.set(title="update: time / ours", ylim=(0, None))
    lines(memory, update, "peak_mb", "ours")
    memory.set(title="update: peak memory / ours", ylim=(0, None))
    lines(speed, rollout, "seconds", "ours, concatenated")
    speed.set(title="rollout: time / ours, concatenated", ylim=(0, None))
    for turns, measured in scaling.items():
        counts = [int(count) for count in measured]
        costs = [_number(measured[str(n)], "seconds") / n / int(turns) * 1000 for n in counts]
        each.plot(counts, costs, marker="o", label=f"{turns} turns")
    each.set(title="update: ms a turn", xlabel="episodes", xscale="log", ylim=(0, 1.4 * each.get_ylim()[1]))
    each.set_xticks(counts, labels=counts)
    each.minorticks_off()
    each.legend(fontsize=8)
    for axes in (time, memory, speed):
        axes.axhline(1, color="grey", linewidth=0.5)
    figure.savefig(given.output, dpi=110)
    print(given.output)


if __name__ == "__main__":
    main()
