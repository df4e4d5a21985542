"""Ctrl-C in a command: training takes the first one as SIGTERM, and saves a checkpoint; a second one ends it at once.

Only a program does this, see `run_program`. In a notebook or another program Ctrl-C stays Python's KeyboardInterrupt.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

EXIT_CODE = 128 + signal.SIGINT  # what a shell reports of a program that Ctrl-C ended
STOPPING = "stopping: the run saves a checkpoint after this step; Ctrl-C again ends it at once"
INTERRUPTED = "interrupted; the same command resumes from what is saved"
# torchrun hands on what the terminal has sent to all processes already.
SECONDS_OF_ONE = 1.0


class CtrlC:
    """Answers Ctrl-C while a program runs.

    Args:
        name: The program's, for its messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._stopping_since: float | None = None

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Takes Ctrl-C over for the time of the block; in another thread than the main one nothing is taken over.

        Raises:
            SystemExit: With code 130, if Ctrl-C has ended the block.
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
        if not callable(signal.getsignal(signal.SIGTERM)):  # nothing that could save a checkpoint is running
            raise KeyboardInterrupt
        self._stopping_since = time.monotonic()
        signal.signal(signal.SIGINT, self._second)
        self._say(STOPPING)
        signal.raise_signal(signal.SIGTERM)

    def _second(self, *_: Any) -> None:
        since = time.monotonic() - (self._stopping_since or 0.0)
        if "TORCHELASTIC_RUN_ID" in os.environ and since < SECONDS_OF_ONE:
            return
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)

    def _say(self, text: str) -> None:
        """Writes to stderr, from the first rank, past Python's buffers: a signal may come while they are in use."""
        if os.environ.get("RANK", "0") == "0":
            os.write(2, f"\n{self.name}: {text}\n".encode())
