"""Checks that several processes learn the same as one process. A rehearsal for a node of 8 GPUs, on a CPU.

    python benchmarks/rehearse.py                 # 8 processes (make rehearse); about 6 GB of memory
    python benchmarks/rehearse.py --processes 2

After a short warm start, the main recipe takes two RL steps at tiny scale, to its checkpoint and its final model: in
one process, then under DDP and under ZeRO-3 by `accelerate launch` with the shipped configs. Each process plays its
share of the episodes. Random states differ between processes, so each then learns from its share of the single
process's episodes, and the results must be the same: the exit code is 1 if one is not.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from harness import run_program, table
from server_process import free_port
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes"
WORKER = Path(__file__).with_name("rehearse_worker.py")
ALONE = "one process"
CONFIGS = {"DDP": "multi_gpu", "ZeRO-3": "zero3"}  # names in accelerate_configs
KINDS = {ALONE: "NO", "DDP": "MULTI_CPU", "ZeRO-3": "DEEPSPEED"}  # accelerate's names on a CPU
EPISODES, ROWS = 16, 2  # episodes per RL step; rows per micro-batch

# Tolerances between several processes and one. Partial sums of a batch are rounded differently, Adam divides small
# gradients by themselves, and the second step starts from the weights of the first.
LOSS = 1e-4  # loss and gradient norm, relative, plus 1e-6
ADVANTAGE = 1e-5  # largest difference of an advantage
WEIGHTS = 1e-3  # norm of the difference, relative to the change in two steps

WARM_START = ["--episodes", "60", "--max_steps", "60", "--per_device_train_batch_size", "8", "--warmup_steps", "10"]
WARM_START += ["--save_strategy", "no"]
RL = ["--per_device_train_batch_size", str(ROWS), "--max_turns", "8", "--max_steps", "2", "--warmup_steps", "0"]
RL += ["--save_steps", "1", "--eval_on_start", "false", "--eval_strategy", "no"]
QUIET = ["--report_to", "none", "--disable_tqdm", "true"]


def run(words: Sequence[str], log: Path) -> None:
    """Runs a program to its end, or exits with its output."""
    run_program(words, log, tree=ROOT)


def launcher(config: str, processes: int) -> list[str]:
    """Builds the command of `accelerate launch` with a shipped config, on a CPU."""
    words = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "accelerate_configs" / f"{config}.yaml")]
    words += ["--mixed_precision", "no", "--num_processes", str(processes)]
    return [*words, "--main_process_port", str(free_port())]


def rehearse(folder: Path, processes: int) -> dict[str, dict[str, Any]]:
    """Trains in each way and returns the results."""
    start = folder / "start"
    words = ["--config", str(RECIPES / "alfworld" / "sft_tiny_cpu.yaml"), "--output_dir", str(start)]
    run([str(RECIPES / "sft.py"), *words, *WARM_START, *QUIET], folder / "start.log")
    print("warm start done", flush=True)
    left = {}
    for way in (ALONE, *CONFIGS):
        count = processes if way in CONFIGS else 1
        launch = launcher(CONFIGS[way], count) if way in CONFIGS else []
        words = [str(WORKER), str(folder / "episodes"), "--config", str(RECIPES / "alfworld" / "tiny_cpu.yaml")]
        words += ["--model_name_or_path", str(start), "--output_dir", str(folder / way)]
        words += ["--gradient_accumulation_steps", str(EPISODES // (ROWS * count)), *RL, *QUIET]
        run([*launch, *words], folder / f"{way}.log")
        print(f"{way} done", flush=True)
        left[way] = json.loads((folder / way / "rehearsal.json").read_text(encoding="utf-8"))
        left[way]["weights"] = safetensors.torch.load_file(folder / way / "model.safetensors")
        left[way]["start"] = safetensors.torch.load_file(start / "model.safetensors")
        assert (folder / way / "checkpoint-2").is_dir(), "the recipe saves a checkpoint"
    return left


def compare(left: dict[str, dict[str, Any]], processes: int) -> tuple[list[list[Any]], list[str]]:
    """Returns the rows of the table and the differences."""
    alone, rows, wrong = left[ALONE], [], []
    moved = norm(alone["weights"], alone["start"])
    if not moved > 0 or not all(step["largest"] > 0 and step["grad_norm"] > 0 for step in alone["steps"]):
        wrong.append("one process has learned nothing, so nothing is compared")
    for way, own in left.items():
        if (own["kind"], own["processes"]) != (KINDS[way], processes if way in CONFIGS else 1):
            wrong.append(f"{way}: ran as {own['kind']} with {own['processes']} processes")
        for number, (mine, theirs) in enumerate(zip(own["steps"], alone["steps"], strict=True), 1):
            far = max(abs(a - b) for a, b in zip(mine["advantages"], theirs["advantages"], strict=True))
            shown = f"{mine['loss']:.7f}", f"{mine['grad_norm']:.6f}", f"{mine['largest']:.4f}", f"{far:.1e}", ""
            rows.append([way, own["processes"], number, *shown])
            wrong += [f"{way}, RL step {number}: {line}" for line in differences(mine, theirs, far)]
        apart = norm(own["weights"], alone["weights"]) / moved
        rows[-1][-1] = f"{apart:.1e}"
        if not apart <= WEIGHTS:
            wrong.append(f"{way}: the final weights differ by {apart:.1e} of what they moved, more than {WEIGHTS:g}")
    return rows, wrong


def differences(mine: dict[str, Any], theirs: dict[str, Any], far: float) -> Iterator[str]:
    """Yields the differences in an RL step; `far` is the largest difference of an advantage."""
    for name in ("loss", "grad_norm"):
        if not math.isclose(mine[name], theirs[name], rel_tol=LOSS, abs_tol=1e-6):
            yield f"{name} is {mine[name]}, in one process {theirs[name]}"
    if not far <= ADVANTAGE:
        yield f"an advantage differs by {far:.1e}, more than {ADVANTAGE:g}"


def norm(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Computes the norm of the difference of two models with the same weight names."""
    assert one.keys() == other.keys()
    return torch.stack([(one[name] - other[name]).double().norm() for name in one]).norm().item()


def main() -> None:
    """Runs the rehearsal, prints the table and exits with 1 if the results differ."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--processes", type=int, default=8, choices=(2, 4, 8))
    processes = args.parse_args().processes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes and files are removed too
    with tempfile.TemporaryDirectory() as folder:
        rows, wrong = compare(rehearse(Path(folder), processes), processes)
    head = ["", "processes", "RL step", "loss", "gradient norm", "largest advantage", "advantages apart"]
    print(table([*head, "final weights apart"], rows))
    same = f"the same: loss and gradient norm to {LOSS:g}, advantages to {ADVANTAGE:g}, weights to {WEIGHTS:g}"
    print("\n".join(wrong) or same)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
