"""The main example, end to end: warm start, RL, and a comparison. `make train` runs this.

    python recipes/make_train.py --env alfworld --algo grpo_epo --seed 0
    python recipes/make_train.py --env alfworld-real --model HuggingFaceTB/SmolLM2-135M-Instruct

1. `recipes/sft.py` warm-starts a model on expert episodes: a tiny one on a CPU, or the chat model of `--model`.
2. `recipes/<env>_{grpo,ppo}_epo.py` trains it with RL; the test lists are evaluated before and after.
3. A table compares both evaluations, and a plot shows the run.

Finished steps are not repeated, and an interrupted one resumes from its last checkpoint. If a folder holds a run with
other settings, the recipe fails and names them.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from epo_trl.evaluation import EvalReport, format_table
from epo_trl.evaluation.report import report_files
from epo_trl.lab.plots import plot_runs

RECIPES = Path(__file__).parent


class Environment(NamedTuple):
    """The folder of the configs, the suffix of the tiny model's, and the name of the chat model's, if there are any."""

    folder: str
    ending: str = ""
    chat: str = ""


ENVIRONMENTS = {
    "alfworld": Environment("alfworld"),
    "alfworld-real": Environment("alfworld", "_real", chat="smollm2"),  # the games of $ALFWORLD_DATA
    "scienceworld": Environment("scienceworld"),
    "webshop": Environment("webshop"),  # a generated shop
}


class Algorithm(NamedTuple):
    """The suffix of a recipe's name, the name of its config, and the config's overrides."""

    recipe: str
    config: str
    overrides: tuple[str, ...] = ()


CPU_HOURS = (
    "Computed for one core: 3 to 4 hours for the warm start, 1.2 for each of 3 evaluations of 274 games, 14 to 16 for "
    "60 RL steps. A GPU takes 5 minutes (docs/pretrained.md)."
)
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


def chat_configs(environment: Environment, model: str) -> tuple[str, str]:
    """Returns the configs of a chat model's warm start and RL, and without a GPU says what they take."""
    machine = "1gpu" if torch.cuda.is_available() else "cpu"
    if machine == "cpu":
        sys.stderr.write(f"make train: no GPU, so {model} is trained on the CPU. {CPU_HOURS}\n")
    return f"sft_{environment.chat}_{machine}", f"{environment.chat}_{machine}"


def next_commands(policy: Path, config: str) -> str:
    """Formats the commands that look at a trained policy."""
    evaluate = config.replace("ppo_", "").replace("/", "/eval_")
    return (
        f"next: epo-trl watch {policy}     a page of its episodes (.venv/bin/epo-trl, if .venv is not active)\n"
        f"      epo-trl evaluate --config {evaluate} --model_name_or_path {policy}\n"
    )


def main() -> None:
    """Runs the three steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=ENVIRONMENTS, default="alfworld")
    parser.add_argument("--model", help="a chat model, Hub id or folder, with --env alfworld-real; else a tiny model")
    parser.add_argument("--algo", choices=ALGORITHMS, default="grpo_epo")
    parser.add_argument("--seed", type=int, default=0, help="seed of the warm start, of RL and of the sampling")
    parser.add_argument("--output_dir", type=Path, help="runs/<env>-tiny or runs/<env>-<model> by default")
    parser.add_argument(
        "--sft", default="", metavar="OPTIONS", help="options of the warm start, as one word; others are RL's"
    )
    args, overrides = parser.parse_known_args()

    environment, algorithm = ENVIRONMENTS[args.env], ALGORITHMS[args.algo]
    warm, config = f"sft_tiny_cpu{environment.ending}", f"{algorithm.config}{environment.ending}"
    sft_options = shlex.split(args.sft)
    if args.model:
        if not environment.chat or not args.algo.startswith("grpo"):
            parser.error("--model: expected --env alfworld-real and --algo grpo_epo or grpo beside it")
        warm, config = chat_configs(environment, args.model)
        sft_options = ["--model_name_or_path", args.model, *sft_options]
    folder = args.output_dir or Path(f"runs/{args.env}-{Path(args.model).name if args.model else 'tiny'}")
    configs = RECIPES / environment.folder
    warm_start, policy = folder / f"sft-seed{args.seed}", folder / f"{args.algo}-seed{args.seed}"
    run("sft.py", configs / f"{warm}.yaml", warm_start, args.seed, *sft_options)
    run(
        f"{environment.folder}_{algorithm.recipe}", configs / f"{config}.yaml", policy, args.seed,
        "--model_name_or_path", str(warm_start), *algorithm.overrides, *overrides,
    )  # fmt: skip
    table = format_table(read_reports(policy))
    (policy / "table.txt").write_text(table, encoding="utf-8")
    plot = plot_runs([policy], policy / "curves.png")
    sys.stdout.write(f"\n{table}\ncurves: {plot}\npolicy: {policy}\n")
    sys.stdout.write(next_commands(policy, f"{environment.folder}/{config}"))


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
