"""Runs several programs in parallel, none of which outlives this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from epo_trl.envs.supervisor import ChildProcess

CHILD_GUARD = Path(__file__).with_name("child_guard.py")
TAIL_BYTES = 4096  # bytes read from the end of a log


@dataclass(slots=True)
class Job:
    """A program to run.

    Args:
        name: Unique name, for `after` and messages.
        command: Program and its arguments.
        log: File to which its output is appended.
        environment: Environment variables of the process.
        after: Name of a job that has to succeed first; a job that is not in the list counts as succeeded.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    after: str | None = None


@dataclass(slots=True)
class Progress:
    """State of the jobs, by name. A waiting job is in none of these.

    Args:
        running: Start times, by `time.monotonic()`.
        succeeded: Durations in seconds.
        failed: Reasons of failures.
    """

    running: dict[str, float] = field(default_factory=dict)
    succeeded: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def run_jobs(
    jobs: Sequence[Job],
    at_a_time: int,
    on_start: Callable[[Job], None],
    on_end: Callable[[Job], str],
    watch: Callable[[Progress], None],
    on_interrupt: Callable[[], None] = lambda: None,
    poll_seconds: float = 0.2,
) -> Progress:
    """Runs the jobs and returns their final state. A failed job cancels only the jobs that depend on it.

    Ctrl-C or SIGTERM sends SIGTERM to the running jobs and waits for them; a second one kills them.

    Args:
        jobs: Jobs in the order of their start.
        at_a_time: Number of parallel jobs.
        on_start: Called right before a job starts. If it raises an `OSError`, the job fails.
        on_end: Called when a job has exited with 0; returns an error text, or `""`.
        watch: Called at every poll with the progress.
        on_interrupt: Called once, before the running jobs are waited for.
        poll_seconds: Interval between polls.

    Raises:
        KeyboardInterrupt: After the jobs have ended, if they were interrupted.
    """
    progress, children = Progress(), dict[str, ChildProcess]()
    waiting = list(jobs)
    by_name = {job.name: job for job in jobs}
    try:
        with _sigterm_as_interrupt():
            while waiting or children:
                for name, status in _ended(children):
                    children.pop(name).close()
                    _settle(by_name[name], status, progress, on_end)
                for job in _ready(waiting, by_name, progress)[: at_a_time - len(children)]:
                    waiting.remove(job)
                    try:
                        on_start(job)
                        children[job.name] = _start(job)
                        progress.running[job.name] = time.monotonic()
                    except OSError as error:  # a full disk, for example
                        progress.failed[job.name] = f"could not be started: {error}"
                watch(progress)
                if children:
                    time.sleep(poll_seconds)
    except KeyboardInterrupt:
        if children:
            on_interrupt()
        _end(list(children.values()))
        raise
    finally:
        for child in children.values():
            child.close()
    return progress


def _ended(children: Mapping[str, ChildProcess]) -> list[tuple[str, int]]:
    """Returns name and exit status of the jobs that have ended."""
    found = [(name, child.exit_status()) for name, child in children.items()]
    return [(name, status) for name, status in found if status is not None]


def _ready(waiting: list[Job], by_name: Mapping[str, Job], progress: Progress) -> list[Job]:
    """Returns the jobs that can start; those that never can are removed and marked as failed."""
    for job in list(waiting):
        if job.after in progress.failed:
            waiting.remove(job)
            progress.failed[job.name] = f"{job.after} has failed"
    return [job for job in waiting if job.after not in by_name or job.after in progress.succeeded]


def _start(job: Job) -> ChildProcess:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with open(job.log, "ab") as log:
        return ChildProcess(
            job.name, [sys.executable, str(CHILD_GUARD), *job.command], lambda: None, lambda: None,
            stdin=subprocess.PIPE, stdout=log, stderr=log, env=dict(job.environment),
        )  # fmt: skip


def _settle(job: Job, status: int, progress: Progress, on_end: Callable[[Job], str]) -> None:
    seconds = time.monotonic() - progress.running.pop(job.name)
    wrong = f"exit code {status}{_last_words(job.log)}" if status else on_end(job)
    if wrong:
        progress.failed[job.name] = f"{wrong}, see {job.log}"
    else:
        progress.succeeded[job.name] = seconds


def read_tail(log: Path) -> str:
    """Reads the end of a log."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read().decode("utf-8", "replace")


def _last_words(log: Path) -> str:
    """Returns the last line of a log after a colon; `""` if it has none."""
    lines = [line.strip() for line in read_tail(log).splitlines()]
    last = next((line for line in reversed(lines) if line), "")
    return f": {last[:300]}" if last else ""


def _end(children: Sequence[ChildProcess]) -> None:
    """Lets the programs save their progress and waits for them. Another Ctrl-C leaves them to be killed."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(KeyboardInterrupt):
        while any(child.exit_status() is None for child in children):
            time.sleep(0.1)


@contextlib.contextmanager
def _sigterm_as_interrupt():  # type: ignore[no-untyped-def]
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
