"""The main example on a CPU, end to end: warm start, RL, and a comparison. `make train` runs this.

    python recipes/make_train.py --env alfworld --algo grpo_epo --seed 0

1. `recipes/sft.py` warm-starts a tiny model on expert episodes.
2. `recipes/<env>_{grpo,ppo}_epo.py` trains it with RL; the test lists are evaluated before and after.
3. A table compares both evaluations, and a plot shows the run.

Finished steps are not repeated, and an interrupted one resumes from its last checkpoint. If a folder holds a run with
other settings, the recipe fails and names them.
"""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from epo_trl.evaluation import EvalReport, format_table
from epo_trl.evaluation.report import report_files
from epo_trl.lab.plots import plot_runs

RECIPES = Path(__file__).parent


class Environment(NamedTuple):
    """The folder of the configs, and the suffix of their names."""

    folder: str
    ending: str = ""


ENVIRONMENTS = {
    "alfworld": Environment("alfworld"),
    "alfworld-real": Environment("alfworld", "_real"),  # the games of $ALFWORLD_DATA
    "scienceworld": Environment("scienceworld"),
    "webshop": Environment("webshop"),  # a generated shop
}


class Algorithm(NamedTuple):
    """The suffix of a recipe's name, the name of its config, and the config's overrides."""

    recipe: str
    config: str
    overrides: tuple[str, ...] = ()


NO_EPO = ("--epo_lambda", "0")
ALGORITHMS = {
    "grpo_epo": Algorithm("grpo_epo.py", "tiny_cpu"),
    "grpo": Algorithm("grpo_epo.py", "tiny_cpu", NO_EPO),
    "ppo_epo": Algorithm("ppo_epo.py", "ppo_tiny_cpu"),
    "ppo": Algorithm("ppo_epo.py", "ppo_tiny_cpu", NO_EPO),
}


def run(script: str, config: Path, output_dir: Path, seed: int, *overrides: str) -> None:
    """Runs a recipe to its end. It leaves a finished run unchanged, and rejects other settings."""
    command = [sys.executable, str(RECIPES / script), "--config", str(config)]
    command += ["--output_dir", str(output_dir), "--seed", str(seed), *overrides]
    sys.stderr.write(f"$ {' '.join(command)}\n")
    # Ctrl-C reaches the recipe too, which saves a checkpoint: wait for it.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        subprocess.run(command, check=True)
    finally:
        signal.signal(signal.SIGINT, before)


def read_reports(run_dir: Path) -> dict[str, list[EvalReport]]:
    """Loads the reports of the first and the last evaluation of a run."""
    files = [*report_files(run_dir).values()]
    if len(files) < 2:
        raise SystemExit(f"{run_dir}: expected one evaluation before and one after RL, got {len(files)}")
    read = [json.loads(file.read_text(encoding="utf-8")) for file in (files[0], files[-1])]
    before, after = ([EvalReport.from_dict(report) for report in data["reports"]] for data in read)
    return {"before RL": before, "after RL": after}


def main() -> None:
    """Runs the three steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=ENVIRONMENTS, default="alfworld")
    parser.add_argument("--algo", choices=ALGORITHMS, default="grpo_epo")
    parser.add_argument("--seed", type=int, default=0, help="seed of the warm start, of RL and of the sampling")
    parser.add_argument("--output_dir", type=Path, help="runs/<env>-tiny by default")
    args, overrides = parser.parse_known_args()

    environment, algorithm = ENVIRONMENTS[args.env], ALGORITHMS[args.algo]
    folder = args.output_dir or Path(f"runs/{args.env}-tiny")
    configs, ending = RECIPES / environment.folder, environment.ending
    warm_start, policy = folder / f"sft-seed{args.seed}", folder / f"{args.algo}-seed{args.seed}"
    run("sft.py", configs / f"sft_tiny_cpu{ending}.yaml", warm_start, args.seed)
    run(
        f"{environment.folder}_{algorithm.recipe}", configs / f"{algorithm.config}{ending}.yaml", policy, args.seed,
        "--model_name_or_path", str(warm_start), *algorithm.overrides, *overrides,
    )  # fmt: skip
    table = format_table(read_reports(policy), width=140)
    (policy / "table.txt").write_text(table, encoding="utf-8")
    plot = plot_runs([policy], policy / "curves.png")
    sys.stdout.write(f"\n{table}\ncurves: {plot}\npolicy: {policy}\n")


def interrupted() -> None:
    """Prints a line and ends the program as Ctrl-C does."""
    sys.stderr.write("interrupted; run the same command again to resume from the last checkpoint\n")
    raise SystemExit(128 + signal.SIGINT)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        interrupted()
    except subprocess.CalledProcessError as error:
        if error.returncode in (128 + signal.SIGINT, -signal.SIGINT):
            interrupted()
        raise SystemExit(f"{Path(error.cmd[1]).name} stopped with exit code {error.returncode}") from None
