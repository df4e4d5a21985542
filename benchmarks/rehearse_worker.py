"""One process of `rehearse.py`: the main recipe, `alfworld_grpo_epo.py`, on episodes that a single process has played.

python benchmarks/rehearse_worker.py EPISODES [OPTION OF THE RECIPE ...]

The single process writes the folder EPISODES, the others read it. The results go to `rehearsal.json` in the recipe's
`output_dir`.
"""

from __future__ import annotations

import epo_trl.threads  # noqa: F401 - before torch

import importlib.util
import json
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from epo_trl.cli import train
from epo_trl.cli.options import read_command_line
from epo_trl.trainers import EPOConfig, EPOTrainer
from epo_trl.types import Episode

EPISODES = Path(sys.argv.pop(1))


class RehearsalTrainer(EPOTrainer):
    """Plays like any other trainer, but learns from this rank's share of the single process's episodes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.advantages: list[list[float]] = []  # per RL step and episode

    def play(self, tasks: Sequence[tuple[str, int]], **kwargs: Any) -> list[Episode]:
        """Plays the tasks, then returns the single process's episodes of the same tasks."""
        episodes, file = super().play(tasks, **kwargs), EPISODES / f"{self.rl_step}.pickle"
        if self.ranks.count == 1:
            EPISODES.mkdir(exist_ok=True)
            file.write_bytes(pickle.dumps(episodes))
            return episodes
        first = self.ranks.index * len(tasks)
        share = pickle.loads(file.read_bytes())[first : first + len(tasks)]
        assert [e.task_id for e in share] == [e.task_id for e in episodes], "other tasks than the one process"
        return share

    def _advantages(self, *args: Any) -> Tensor:
        advantages = super()._advantages(*args)
        own = advantages.abs().amax(1) * advantages.sum(1).sign()  # one value for all tokens of an episode
        self.advantages.append(self.ranks.gather(own.tolist()))
        return advantages

    def train_to_end(self) -> None:
        """Trains and writes the results."""
        super().train_to_end()
        losses = [line for line in self.state.log_history if "loss" in line]
        steps = [
            {"loss": line["loss"], "grad_norm": line["grad_norm"], "advantages": own, "largest": max(map(abs, own))}
            for line, own in zip(losses, self.advantages, strict=True)
        ]
        result = {
            "kind": self.accelerator.distributed_type.value, "processes": self.accelerator.num_processes, "steps": steps
        }  # fmt: skip
        if self.accelerator.is_main_process:
            Path(self.args.output_dir, "rehearsal.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    if importlib.util.find_spec("deepspeed"):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it is compiled for 38 s
    train.ALGORITHMS["grpo"] = (EPOConfig, RehearsalTrainer)
    train.main(read_command_line(sys.argv[1:]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # DeepSpeed sometimes aborts during interpreter shutdown, after all is done
