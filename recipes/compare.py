"""Several seeds of several algorithms side by side: `make train` for each, then mean and spread.

    python recipes/compare.py --algos grpo grpo_epo --seeds 0 1 2

Runs of one seed share their warm start. Finished runs are not repeated.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from make_train import ALGORITHMS, ENVIRONMENTS, RECIPES, output_dir, read_reports

from epo_trl.plots import plot_runs


def main() -> None:
    """Runs what is missing, then writes `comparison.{md,json,png}`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=ENVIRONMENTS, default="alfworld")
    parser.add_argument("--algos", nargs="+", choices=ALGORITHMS, default=["grpo", "grpo_epo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output_dir", type=Path, help="runs/<env>-tiny by default")
    args, overrides = parser.parse_known_args()
    folder = args.output_dir or output_dir(args.env)

    results: dict[str, dict[str, list[float]]] = {}
    for algo in args.algos:
        for seed in args.seeds:
            command = [sys.executable, str(RECIPES / "make_train.py"), "--algo", algo, "--seed", str(seed)]
            subprocess.run([*command, "--env", args.env, "--output_dir", str(folder), *overrides], check=True)
            for when, reports in read_reports(folder / f"{algo}-seed{seed}").items():
                for report in reports:
                    cell = results.setdefault(f"{algo}, {when}", {}).setdefault(report.split, [])
                    cell.append(report.success_rate)
                    protocol, episodes = report.protocol.name, report.episodes

    table = markdown(results, args.seeds, protocol, episodes)
    (folder / "comparison.md").write_text(table, encoding="utf-8")
    (folder / "comparison.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    runs = [folder / f"{algo}-seed{seed}" for algo in args.algos for seed in args.seeds]
    plot = plot_runs(runs, folder / "comparison.png")
    sys.stdout.write(f"\n{table}\ncurves: {plot}\n")


def markdown(results: dict[str, dict[str, list[float]]], seeds: list[int], protocol: str, episodes: int) -> str:
    """Returns a table: mean and standard deviation over seeds in percent, and each seed's value."""
    splits = list(next(iter(results.values())))
    lines = [
        f"Success in %, protocol `{protocol}`, {episodes} games a list; mean ± standard deviation over seeds "
        f"{', '.join(map(str, seeds))} (each seed).",
        "",
        "| | " + " | ".join(splits) + " |",
        "|---" * (len(splits) + 1) + "|",
    ]
    for name, cells in results.items():
        lines.append(f"| {name} | " + " | ".join(spread(cells[split]) for split in splits) + " |")
    return "\n".join(lines) + "\n"


def spread(rates: list[float]) -> str:
    """Returns for example `41.0 ± 3.2 (38.0, 41.0, 44.0)`."""
    each = ", ".join(f"{100 * rate:.1f}" for rate in rates)
    deviation = f" ± {100 * statistics.stdev(rates):.1f}" if len(rates) > 1 else ""
    return f"{100 * statistics.mean(rates):.1f}{deviation} ({each})"


if __name__ == "__main__":
    main()
