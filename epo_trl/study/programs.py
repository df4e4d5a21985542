"""Runs several programs at a time, none of which outlives this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock
from typing import TypeVar

Item = TypeVar("Item")
CHILD_GUARD = Path(__file__).with_name("child_guard.py")
TAIL_BYTES = 4096  # bytes read from the end of a log


class Programs:
    """The running programs. Each belongs to a process group, which is killed when this process is gone.

    Args:
        on_interrupt: Called after the first Ctrl-C or SIGTERM.
    """

    def __init__(self, on_interrupt: Callable[[], None]) -> None:
        self._on_interrupt = on_interrupt
        self._running: set[subprocess.Popen] = set()
        self._lock = Lock()
        self._stopped = False
        self._pipe, self._held = os.pipe()  # the other end of the pipe closes when this process ends

    def run(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> str:
        """Runs a program until it ends. Returns `""` or, if it failed, its exit code and the last line of its log.

        Args:
            command: Program and its arguments.
            log: File to which its output is appended.
            environment: Environment variables of the process.
        """
        with self._lock, open(log, "ab") as file:
            if self._stopped:
                return "interrupted"
            program = subprocess.Popen(
                [sys.executable, str(CHILD_GUARD), *command], stdin=self._pipe, stdout=file, stderr=file,
                env=dict(environment), start_new_session=True,
            )  # fmt: skip
            self._running.add(program)
        status = program.wait()
        self._running.discard(program)
        return f"exit code {status}{_last_line(log)}" if status else ""

    def map(self, work: Callable[[Item], str], items: Sequence[Item], at_a_time: int) -> Iterator[tuple[Item, str]]:
        """Yields each item with the result of `work`, as they end. Ctrl-C or SIGTERM lets the programs save and ends.

        A second Ctrl-C kills the programs.

        Raises:
            KeyboardInterrupt: After the programs have ended, if they were interrupted.
        """
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        pool = ThreadPoolExecutor(at_a_time)
        futures = {pool.submit(work, item): item for item in items}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except KeyboardInterrupt:
            self._on_interrupt()
            self._signal(signal.SIGTERM)
            with contextlib.suppress(KeyboardInterrupt):
                pool.shutdown(cancel_futures=True)
            self._signal(signal.SIGKILL)
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            signal.signal(signal.SIGTERM, before)

    def _signal(self, number: int) -> None:
        with self._lock:
            self._stopped = True
            for program in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, number)


def _last_line(log: Path) -> str:
    """Returns the last line of a log after a colon; `""` if it has none."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {last[:300]}" if last else ""
