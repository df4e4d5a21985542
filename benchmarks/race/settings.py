"""What TRL's trainer and this package's are configured with: the same, as far as both have it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from clock import Clock
from games import EPISODES, GROUP

LEARNING_RATE = 5e-4  # the peak of recipes/alfworld/tiny_cpu.yaml


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns the options of both programs."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", type=Path, default=Path("runs/race"), help="holds `warm` and gets a folder per run")
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--budget", type=float, default=360.0, help="CPU seconds of training of each run")
    made.add_argument("--marks", type=int, default=1, help="number of checkpoints of each run")
    made.add_argument("--most", type=int, default=1000, help="RL steps after which a run ends in any case")
    return made


def open_clock(args: argparse.Namespace, name: str, seed: int) -> Clock | None:
    """Returns the clock of a run; `None` if the run is finished."""
    folder = args.folder / f"{name}-{seed}"
    if any(folder.glob("at-*")):
        return None
    return Clock(folder, args.budget, args.marks, args.most)


def trainer_settings(folder: Path, seed: int) -> dict[str, Any]:
    """Returns the fields of TRL's `GRPOConfig` for both trainers; what is missing has TRL's default.

    One RL step is one optimizer step on `EPISODES` episodes, in micro-batches of 8.
    """
    return {
        "output_dir": str(folder / "trainer"),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": EPISODES // 8,
        "num_generations": GROUP,
        "scale_rewards": "batch",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_steps": 100_000,  # the clock ends the run
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "disable_dropout": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "seed": seed,
    }
