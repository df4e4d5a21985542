"""Credits against true advantages for policies in training, over several seeds: warm start, RL, audits of checkpoints.

python benchmarks/credit_audit_trained.py --runs runs/credit_audit --out results/credit_audit/trained_seeds.json

An interrupted command goes on where it stopped. Words after `--` are options of every program, such as
`-- --room_types bathrooms`. `--only_report` compares the audits that are there.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from credit_audit_expert import comparison_of, facts

from epo_trl.cli import main as epo_trl
from epo_trl.lab.credit_audit.statistics import ranked, summary
from epo_trl.lab.study.statistics import estimate

START = 0


def run(*words: object) -> None:
    """Runs a command of epo-trl; stops if it fails."""
    print("epo-trl", *words, flush=True)
    if code := epo_trl([str(word) for word in words]):
        raise SystemExit(code)


def warm_start(args: argparse.Namespace, seed: int) -> Path:
    """Returns the folder of the policy that a seed's RL starts from."""
    folder = args.runs / f"sft-{seed if args.own_warm_starts else args.seeds[0]}"
    if not (folder / "model.safetensors").is_file():
        words = ["--max_steps", args.sft_steps, "--episodes", args.sft_episodes, "--save_strategy", "no"]
        run("sft", "--config", args.sft_config, *words, "--seed", folder.name[4:], "--output_dir", folder, *args.rest)
    return folder


def train(args: argparse.Namespace, seed: int, start: Path) -> Path:
    """Returns the folder of a seed's run, with a checkpoint for each stage."""
    folder = args.runs / f"rl-{seed}"
    if not (folder / f"checkpoint-{args.stages[-1]}").is_dir():
        every = args.stages[1] - args.stages[0]
        words = ["--max_steps", args.stages[-1], "--save_steps", every, "--save_total_limit", 99, "--warmup_steps", 2]
        words += ["--gradient_accumulation_steps", args.micro_batches, "--epo_lambda", 0]
        words += ["--eval_strategy", "no", "--eval_on_start", "false", "--model_name_or_path", start]
        run("train", "--config", args.config, "--seed", seed, "--output_dir", folder, *words, *args.rest)
    return folder


def audit(args: argparse.Namespace, seed: int, stage: int, policy: Path) -> list[dict]:
    """Returns the rounds of the audit of a checkpoint."""
    folder = args.runs / f"audit-{seed}-{stage}"
    if not args.only_report:
        words = ["--audit_folder", folder, "--audit_tasks", args.tasks, "--audit_group", args.group]
        words += ["--audit_episodes", args.episodes, "--audit_continuations", args.continuations]
        words += ["--audit_parallel", args.parallel, "--audit_minutes", args.minutes, "--seed", seed]
        run("audit-credit", policy, "--config", args.config, *words, *args.rest)
    rounds = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("round-*.json"))]
    return [{**one, "task": [f"seed {seed} {task}" for task in one["task"]]} for one in rounds]


def over_seeds(seeds: dict[int, list[dict]], deviation: float) -> dict[str, dict]:
    """Returns for each credit the mean over seeds of its correlation and of its gain, with Student's t interval.

    The deviation of A*, by which the noise of its estimates is corrected for, is that of all seeds together: a single
    audit with few continuations knows it badly.
    """
    found: dict[str, list[float]] = {}
    for rounds in seeds.values():
        truth = np.array([pair for one in rounds for pair in one["halves"]]).mean(1)
        for name in rounds[0]["credits"]:
            credit = np.array([x for one in rounds for x in one["credits"][name]])
            value = np.cov(credit, truth)[0, 1] / (credit.std() * deviation) if credit.std() > 1e-9 else np.nan
            found.setdefault(name, []).append(float(value))
    gains = {name: [a - b for a, b in zip(values, found["grpo"], strict=True)] for name, values in found.items()}
    return {
        name: {"correlation": asdict(estimate(values)), "gain": asdict(estimate(gains[name])), "gains": gains[name]}
        for name, values in found.items()
        if np.isfinite([*values, *gains[name]]).all()
    }


def report(args: argparse.Namespace, found: dict[int, dict[int, list[dict]]]) -> None:
    """Writes the comparison of each seed and stage, and those over seeds."""
    rows = []
    for stage, seeds in found.items():
        own = [{"stage": stage, "seed": seed, **facts(rounds, 0.0)} for seed, rounds in seeds.items()]
        rows += own
        pooled = [one for rounds in seeds.values() for one in rounds]
        shown = comparison_of(pooled)
        rows.append(
            {"stage": stage, "seed": "all", "over_seeds": over_seeds(seeds, shown.deviation), **facts(pooled, 0.0)}
        )
        print(f"\nafter {stage} RL steps, success {rows[-1]['success']:.0%}. {summary(shown)}\n")
        for name, one in ranked(shown):
            spread = rows[-1]["over_seeds"].get(name, {}).get("gain")
            seeds_say = f"{spread['mean']:.2f} [{spread['low']:.2f}, {spread['high']:.2f}]" if spread else ""
            print(f"| {name} | {one.correlation} | {one.gain} | {seeds_say} | {one.sign} | {one.silent:.0%} |")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rows, indent=1).replace(": NaN", ": null")  # without a deviation of A* there is no correlation
    args.out.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/credit_audit"))
    parser.add_argument("--out", type=Path, default=Path("results/credit_audit/trained_seeds.json"))
    parser.add_argument("--config", default="alfworld/tiny_cpu")
    parser.add_argument("--sft_config", default="alfworld/sft_tiny_cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--stages", type=int, nargs="+", default=[START, 20, 40], help="RL steps, at equal distances")
    parser.add_argument("--sft_steps", type=int, default=5000)
    parser.add_argument("--sft_episodes", type=int, default=4000)
    parser.add_argument("--own_warm_starts", action="store_true", help="one for each seed, not one for all")
    parser.add_argument("--micro_batches", type=int, default=8, help="of 8 episodes in an RL step")
    for name, value in {"tasks": 24, "group": 8, "episodes": 1, "continuations": 8, "parallel": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="of an audit")
    parser.add_argument("--minutes", type=float, default=60.0, help="of an audit")
    parser.add_argument("--only_report", action="store_true")
    parser.add_argument("rest", nargs="*")
    args = parser.parse_args()
    found: dict[int, dict[int, list[dict]]] = {stage: {} for stage in args.stages}
    for seed in args.seeds:
        start = run_folder = args.runs
        if not args.only_report:
            start = warm_start(args, seed)
            run_folder = train(args, seed, start)
        for stage in args.stages:
            if rounds := audit(args, seed, stage, run_folder / f"checkpoint-{stage}" if stage else start):
                found[stage][seed] = rounds
    report(args, {stage: seeds for stage, seeds in found.items() if seeds})


if __name__ == "__main__":
    main()
