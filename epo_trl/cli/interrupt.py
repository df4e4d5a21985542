"""Ctrl-C in a command: training treats the first as SIGTERM and saves a checkpoint; the second ends it at once.

Only programs do this, see `run_program`. In a notebook or another program Ctrl-C raises KeyboardInterrupt as usual.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

EXIT_CODE = 128 + signal.SIGINT  # exit code that a shell reports after Ctrl-C
STOPPING = "stopping: the run saves a checkpoint after this step; press Ctrl-C again to end it at once"
INTERRUPTED = "interrupted; repeat the command to resume from the last checkpoint"
# torchrun forwards a signal that the terminal has already sent to all processes.
SECONDS_TO_FORWARD = 1.0


@dataclass
class CtrlC:
    """Handles Ctrl-C while a program runs.

    Args:
        name: Name of the program, for messages.
    """

    name: str
    _stopping_since: float | None = field(default=None, init=False)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles Ctrl-C inside the block. Does nothing outside the main thread.

        Raises:
            SystemExit: With code 130, if Ctrl-C ended the block.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._first)
        try:
            yield
        except KeyboardInterrupt:
            self._say(INTERRUPTED)
            raise SystemExit(EXIT_CODE) from None
        except SystemExit as end:
            if self._stopping_since is not None and end.code == 128 + signal.SIGTERM:
                raise SystemExit(EXIT_CODE) from None
            raise
        finally:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)

    def _first(self, *_: Any) -> None:
        if not callable(signal.getsignal(signal.SIGTERM)):  # nothing is running that could save a checkpoint
            raise KeyboardInterrupt
        self._stopping_since = time.monotonic()
        signal.signal(signal.SIGINT, self._second)
        self._say(STOPPING)
        signal.raise_signal(signal.SIGTERM)

    def _second(self, *_: Any) -> None:
        since = time.monotonic() - (self._stopping_since or 0.0)
        if "TORCHELASTIC_RUN_ID" in os.environ and since < SECONDS_TO_FORWARD:
            return
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)

    def _say(self, text: str) -> None:
        """Writes to stderr from the first rank, without Python's buffers, which may be in use when the signal comes."""
        if os.environ.get("RANK", "0") == "0":
            os.write(2, f"\n{self.name}: {text}\n".encode())
