"""Makes the table and the plot of a race, and the small files in results/race.

python benchmarks/race/report.py runs/race --results results/race --plot docs/race.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

SYSTEMS = {
    "trl_grpo": "TRL, GRPO",
    "ours_grpo": "this package, GRPO",
    "agilerl_ppo": "AgileRL, PPO per turn",
    "ours_ppo": "this package, PPO per turn",
}
ALONE = "agilerl_ppo"  # in seconds only


def collect(folder: Path, results: Path) -> None:
    """Writes one file per finished run: its RL steps and the tests of its checkpoints."""
    results.mkdir(parents=True, exist_ok=True)
    finished = {checkpoint.parent for checkpoint in folder.glob("*/at-*")}
    for run in sorted(each / "steps.jsonl" for each in finished):
        steps = [json.loads(line) for line in run.read_text(encoding="utf-8").splitlines()]
        tests = []
        for test in sorted(run.parent.glob("at-*/test.json")):
            clock = json.loads((test.parent / "clock.json").read_text(encoding="utf-8"))
            tests.append({**clock, **json.loads(test.read_text(encoding="utf-8"))})
        kept = [{key: round(value, 4) for key, value in step.items()} for step in steps]
        text = json.dumps({"steps": kept, "tests": tests})
        (results / f"{run.parent.name}.json").write_text(text + "\n", encoding="utf-8")
    warm = folder / "warm" / "test.json"
    if warm.is_file():
        (results / "warm.json").write_text(warm.read_text(encoding="utf-8") + "\n", encoding="utf-8")


def read(results: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the runs of each system, one per seed."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    for file in sorted(results.glob("*-*.json")):
        found[file.stem.rpartition("-")[0]].append(json.loads(file.read_text(encoding="utf-8")))
    return {name: runs for name, runs in found.items() if runs}


def seconds(run: dict[str, Any], kind: str = "cpu") -> float:
    """Returns the mean seconds of an RL step."""
    return run["steps"][-1][kind] / len(run["steps"])


def success(run: dict[str, Any], first: int, last: int) -> float:
    """Returns the share of won episodes among those from number `first` to `last`."""
    return mean(step["success"] for step in run["steps"] if first < step["episodes"] <= last)


def spread(values: list[float], form: str) -> str:
    """Formats median and range."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Returns a Markdown table with one row per system: median and range over seeds.

    AgileRL is not compared: without a GPU it cannot use its engine for generation, and its runs are one RL step long.
    """
    base = {name: median(map(seconds, runs)) for name, runs in found.items()}
    common = min(run["steps"][-1]["episodes"] for name, runs in found.items() if name != ALONE for run in runs)
    half = common // 2
    head = ["system", "CPU s per RL step", "RL steps", f"won, episodes {half + 1} to {common}"]
    head += ["last 10 RL steps", "test games"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, runs in found.items():
        is_pair = name == "ours_grpo" and "trl_grpo" in base
        faster = f", {base['trl_grpo'] / base[name]:.1f}x as fast" if is_pair else ""
        won: list[list[float]] = []
        if name != ALONE:
            tests = [run["tests"][-1] for run in runs]
            won = [
                [success(run, half, common) for run in runs],
                [mean(step["success"] for step in run["steps"][-10:]) for run in runs],
                [test["won"] / test["games"] for test in tests],
            ]
        cells = [
            SYSTEMS[name],
            spread([seconds(run) for run in runs], ".2f") + faster,
            spread([len(run["steps"]) for run in runs], ".0f"),
            *([spread(values, ".0%") for values in won] or ["", "", ""]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(found: dict[str, list[dict[str, Any]]], target: Path) -> None:
    """Draws success over episodes and over minutes of CPU: a running mean over 5 RL steps, one thin line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    shown = {name: runs for name, runs in found.items() if name != ALONE}
    for color, (name, runs) in zip(("C1", "C0", "C2"), shown.items(), strict=False):
        for number, run in enumerate(runs):
            steps = run["steps"]
            means = [100 * mean(step["success"] for step in steps[max(0, i - 4) : i + 1]) for i in range(len(steps))]
            label = SYSTEMS[name] if number == 0 else None
            axes[0].plot([step["episodes"] for step in steps], means, color=color, lw=1, label=label)
            axes[1].plot([step["cpu"] / 60 for step in steps], means, color=color, lw=1)
    axes[0].set(xlabel="episodes", ylabel="won, in % (mean of 5 RL steps)")
    axes[1].set(xlabel="minutes of CPU")
    axes[0].legend(fontsize=8)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def main() -> None:
    """Collects, prints the table and draws the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="folder of the runs; without it, only `--results` is read")
    parser.add_argument("--results", type=Path, default=Path("results/race"))
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.folder:
        collect(args.folder, args.results)
    found = read(args.results)
    sys.stdout.write(table(found) + "\n")
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
