"""Launches one process per rank on the CPU, once for all tests that read what it wrote."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed_worker import WORLD
from filelock import FileLock

TESTS = Path(__file__).parent
TIMEOUT_SECONDS = 300


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch(
    script: str, runs: Sequence[str], folder: Path, *arguments: str, timeout_seconds: float = TIMEOUT_SECONDS
) -> None:
    """Runs one process per rank; kills them all and shows what they wrote if one fails or time is up."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PYTEST_"))}
    env |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }  # fmt: skip
    processes, logs = [], [folder / f"rank{rank}.log" for rank in range(WORLD)]
    try:
        for rank, log in enumerate(logs):
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(TESTS / script), ",".join(runs), str(folder), *arguments],
                    env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD)},
                    stdout=log.open("w"),
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        end = time.monotonic() + timeout_seconds
        while any(p.poll() is None for p in processes) and time.monotonic() < end:
            if any(p.poll() for p in processes):
                break
            time.sleep(0.2)
        codes = [p.poll() for p in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    tails = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)
    assert codes == [0] * WORLD, f"exit codes {codes} (None: still running after {timeout_seconds} s)\n{tails}"


def launched_once(factory: Any, script: str, runs: Sequence[str], *arguments: str, **limits: float) -> Path:
    """Returns the folder of a launch that all processes of pytest share: most of its time is imports."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / Path(script).stem
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            launch(script, runs, folder, *arguments, **limits)
            (folder / "done").touch()
    return folder
