"""Launches one process per rank on the CPU, once for all tests that read what it wrote."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import forked
import pytest
from distributed_worker import WORLD
from filelock import FileLock
from server_process import free_port

TESTS = Path(__file__).parent
TIMEOUT_SECONDS = 300
DEVICE = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}  # tests/device has another
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="needs deepspeed")


def launch(
    script: str, runs: Sequence[str], folder: Path, *arguments: str, timeout_seconds: float = TIMEOUT_SECONDS,
    start: Callable[..., Any] = forked.start, world: int = WORLD,
) -> None:  # fmt: skip
    """Runs one process per rank; kills them all and shows what they wrote if one fails or time is up."""
    words = [str(TESTS / script), ",".join(runs), str(folder), *arguments]
    env = {**_environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)} for rank in range(world)]
    processes, logs = [], [folder / f"rank{rank}.log" for rank in range(world)]
    try:
        for rank, log in zip(ranks, logs, strict=True):
            processes.append(start(words, cwd=Path.cwd(), log=log, **env, **rank))
        end = time.monotonic() + timeout_seconds
        while any(p.poll() is None for p in processes) and time.monotonic() < end:
            if any(p.poll() for p in processes):
                break
            time.sleep(0.2)
        codes = [p.poll() for p in processes]
    finally:
        for process in processes:
            _end(process)
    tails = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)
    assert codes == [0] * world, f"exit codes {codes} (None: still running after {timeout_seconds} s)\n{tails}"


def _environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PYTEST_"))}
    paths = [str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return env | DEVICE | {
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip


def start_program(words: Sequence[str], *, cwd: Path, log: Path, **env: str) -> subprocess.Popen[bytes]:
    """Starts `python WORDS...` as `forked.start` does, but with all its imports."""
    words = [sys.executable, *words]
    return subprocess.Popen(words, cwd=cwd, env=env, stdout=log.open("w"), stderr=subprocess.STDOUT, process_group=0)


def _end(process: Any) -> None:
    """Ends a process that still runs: first in the way in which a launcher ends its ranks too."""
    for sign, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def launched_once(factory: Any, script: str, runs: Sequence[str], *arguments: str, **limits: Any) -> Path:
    """Returns the folder of a launch that all processes of pytest share."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / Path(script).stem
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            launch(script, runs, folder, *arguments, **limits)
            (folder / "done").touch()
    return folder
