"""Shared parts of the benchmarks: variants of one piece of work, each in its own process, measured in turns.

A variant is a function that builds the work: a function without arguments. Every round runs each variant once, so that
other load on the machine affects all of them alike.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
from tqdm.auto import tqdm

Work = Callable[[], Any]


@dataclass
class Measurement:
    """The measurements of one variant.

    Args:
        seconds: Duration of each round.
        peak_mb: Peak memory during the rounds in MB, above that held after the work was built; of the GPU if there is
            one, otherwise the process's resident memory.
        results: Return value of the work in each round.
    """

    seconds: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    results: list[Any] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median duration in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Range of the rounds, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


def measure(
    variants: Mapping[Any, Callable[[], Work]],
    rounds: int,
    warmup: int = 1,
    environ: Mapping[Any, Mapping[str, str]] | None = None,
) -> dict[Any, Measurement]:
    """Measures each variant.

    Args:
        variants: Maps names to picklable functions that build the work, called in the variant's own process.
        rounds: Number of measured rounds.
        warmup: Number of rounds before the measured ones.
        environ: Environment variables of a variant's process, for settings that are read when torch is loaded.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes, results = {}, [], {}
    for name, make in variants.items():
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=_serve, args=(theirs, make), daemon=True))
        with patch.dict(os.environ, (environ or {}).get(name, {})):
            processes[-1].start()
        theirs.close()
        results[name] = Measurement()
    for name, pipe in pipes.items():  # all build at the same time
        _answer(pipe, name)
    turns = [(i, name) for i in range(-warmup, rounds) for name in pipes]
    for i, name in tqdm(turns, unit="run", leave=False):
        pipe = pipes[name]
        pipe.send(True)
        seconds, peak, result = _answer(pipe, name)
        results[name].peak_mb = peak
        if i >= 0:
            results[name].seconds.append(seconds)
            results[name].results.append(result)
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send(False)
        process.join()
    return results


def _answer(pipe: Any, name: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit(f"{name} failed, see above") from None


def _serve(pipe: Any, make: Callable[[], Work]) -> None:
    work = make()
    before = _held()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    pipe.send(None)
    while pipe.recv():
        start = now()
        result = work()
        seconds = now() - start
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the variants share the GPU
        pipe.send((seconds, (_peak() - before) / 2**20, result))


class PhaseClock:
    """Seconds and peak memory by phase. A phase inside another one does not count for the outer one."""

    def __init__(self) -> None:
        self.phases = ["the rest"]
        self.start()

    def start(self) -> None:
        """Discards what was measured so far."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.peaks: dict[str, float] = defaultdict(float)
        self.reserved = 0.0
        self.mark = now()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def note(self) -> None:
        """Adds the time since the last call to the current phase."""
        phase, time = self.phases[-1], now()
        self.seconds[phase] += time - self.mark
        self.mark = time
        if torch.cuda.is_available():
            self.peaks[phase] = max(self.peaks[phase], torch.cuda.max_memory_allocated())
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
            torch.cuda.reset_peak_memory_stats()

    def begin(self, phase: str) -> None:
        """Begins a phase."""
        self.note()
        self.phases.append(phase)

    def end(self) -> None:
        """Ends the current phase."""
        self.note()
        self.phases.pop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures a block."""
        self.begin(name)
        try:
            yield
        finally:
            self.end()


def now() -> float:
    """Returns the time in seconds, after the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _held() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss


def _peak() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device() -> str:
    """Describes the device of the benchmark."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def run_program(words: Sequence[str], log: Path, *, tree: Path, folder: Path | None = None, minutes: int = 15) -> str:
    """Runs a Python program to its end, offline and on one CPU thread, and returns its output.

    Args:
        words: The program and its options.
        log: File for the output.
        tree: Folder whose `epo_trl` the program imports.
        folder: The program's current folder; by default this process's.
        minutes: Time limit.

    Raises:
        SystemExit: With the end of the output, if the program fails.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")} | {
        "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *words], env=environ, cwd=folder, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            process.wait(60 * minutes)
        finally:
            process.terminate()  # torch's launcher then ends its children
            process.wait()
    output = log.read_text()
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {process.returncode}\n{output[-5000:]}")
    return output


def trainer_settings(**changes: Any) -> dict[str, Any]:
    """Returns fields of a trainer's config: this device, a new folder, and nothing shown or saved during the run."""
    return {
        "output_dir": tempfile.mkdtemp(), "use_cpu": device() == "cpu", "bf16": device() == "cuda", "report_to": [],
        "disable_tqdm": True, "save_strategy": "no", "eval_strategy": "no", "gradient_checkpointing": False, **changes,
    }  # fmt: skip


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Creates a parser with the options of every benchmark."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=3, help="number of measured rounds per variant")
    made.add_argument("--json", type=Path, help="write the results to this file")
    return made


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Formats a Markdown table."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def write(path: Path | None, **content: Any) -> None:
    """Writes results as JSON, with a description of the machine; does nothing without a path."""
    if path is None:
        return
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    machine = {"cores": os.cpu_count(), "gpu": gpu, "python": platform.python_version(), "torch": torch.__version__}
    content = {"machine": machine | {"threads": torch.get_num_threads()}, **content}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=_plain) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Measurement) else str(value)
