"""`python killed_run.py FOLDER KILLS SEED`: a run that is killed at random moments, beside one that is not.

PPO with a critic, a checkpoint at every optimizer step, four of those to an RL step, two RL steps to an epoch. Each
attempt is a fork of this process, so that the imports are paid once. A run that ends before all kills are spent is
compared and followed by another. Prints one JSON line: how many kills there were, how many fell into the writing of a
checkpoint, and how many runs ended.
"""

import gc
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from trainer_kit import make_ppo

from epo_trl.envs.toy import ToySuite
from epo_trl.models.critic import CRITIC_FILE
from epo_trl.runs.files import checkpoints, is_complete

SETTINGS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2,
    "max_steps": 12, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "epo_lambda": 0.1,
    "gae_lambda": 0.9, "critic_learning_rate": 3e-2,
}  # fmt: skip
RESULT = "result.pt"


def train(folder: Path) -> None:
    """Goes on from the newest whole checkpoint, and writes all that a run leaves behind."""
    tasks = Dataset.from_dict({"prompt": ToySuite().task_ids("train")[:16]})
    trainer = make_ppo(folder, train_dataset=tasks, **SETTINGS)
    trainer.train_to_end()
    result = {
        "weights": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "history": trainer.methods["epo"].history.state_dict(),
        "steps": [trainer.state.global_step, trainer.rl_step, trainer._step],
        "files": {name: (folder / name).read_bytes() for name in ("model.safetensors", CRITIC_FILE)},
    }
    torch.save(result, folder / RESULT)


def fork(folder: Path) -> int:
    """Returns the id of a process that trains."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        folder.mkdir(exist_ok=True)
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        train(folder)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(process: int, seconds: float) -> bool:
    """Waits; returns whether the process ended by itself in that time, and raises if it failed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            if status:
                raise RuntimeError(f"the run failed with status {status}")
            return True
        time.sleep(0.002)
    return False


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


def main(folder: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    gc.freeze()  # as in conftest.py, and forks share what is not touched
    began = time.monotonic()
    assert ended(fork(folder / "straight"), 300)
    # Long enough to start again and get some steps further, short enough that most attempts do not reach the end.
    longest = (time.monotonic() - began) / 2
    expected = torch.load(folder / "straight" / RESULT)
    counts, finished = {"kills": 0, "while_saving": 0, "runs": 0}, False
    while counts["kills"] < kills or not finished:
        run = folder / f"killed{counts['runs']}"
        process = fork(run)
        finished = ended(process, rng.uniform(0, longest) if counts["kills"] < kills else 300)
        if finished:
            assert same(torch.load(run / RESULT), expected), f"{run} ended otherwise"
            counts["runs"] += 1
            continue
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        counts["kills"] += 1
        counts["while_saving"] += any(not is_complete(path) for path in checkpoints(run))
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
