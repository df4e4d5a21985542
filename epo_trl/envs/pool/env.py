"""An environment in a worker process."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from epo_trl.envs.base import AsyncTextEnv, EnvError, Info
from epo_trl.envs.pool.worker import PoolSettings, Worker, WorkerLost, WorkerProcess


class PooledEnv(AsyncTextEnv):
    """An environment in a worker process.

    Args:
        worker: Worker that holds the environment.
        settings: Time limits and retries.
    """

    def __init__(self, worker: Worker, settings: PoolSettings) -> None:
        self._worker, self._settings = worker, settings
        self._seat = worker.take_seat()
        self._free = weakref.finalize(self, worker.forget_seat, self._seat)
        self._process: WorkerProcess | None = None  # the process with the running episode
        self._number: int | None = None  # number of the pending request
        self._start: tuple[int | None, dict[str, Any] | None] = (None, None)

    def reset_async(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Starts a reset; `reset_wait` returns its result."""
        if not self._free.alive:
            raise EnvError("reset: the environment is closed; create another")
        self._start = (seed, options)
        self._ask_reset()

    def reset_wait(self) -> tuple[str, Info]:
        """Returns the result of `reset_async`. If the process is lost, the reset is retried in another.

        Raises:
            EnvError: If the environment raised it.
            WorkerLost: If the process died or hung, also in the last retry.
        """
        for _ in range(self._settings.reset_retries):
            try:
                return self._wait()
            except WorkerLost:
                self._worker.faults.retries += 1
                self._ask_reset()
        return self._wait()

    def step_async(self, action: str) -> None:
        """Starts a step; `step_wait` returns its result."""
        if self._process is None:
            raise EnvError("step: no episode is running; call reset(options={'task_id': ...}) first")
        self._forget()
        self._number = self._process.ask(self._seat, "step", (action,), self._settings.step_seconds)

    def step_wait(self) -> tuple[str, float, bool, bool, Info]:
        """Returns the result of `step_async`.

        Raises:
            EnvError: If the environment raised it.
            WorkerLost: If the process died or hung.
        """
        return self._wait()

    def reseed(self, seed: int) -> None:
        """Seeds the random numbers of the environment in its process.

        Raises:
            WorkerLost: If the process died or hung.
        """
        self._process = self._process or self._worker.process()
        self._process.wait(self._process.ask(self._seat, "reseed", (seed,), self._settings.step_seconds))

    def has_answer(self) -> bool:
        """Whether the process has answered the last request, died, or exceeded its time limit."""
        return self._number is None or self._process is None or self._process.has_answer(self._number)

    def close(self) -> None:
        """Closes the environment and, with a worker's last one, stops the process. May be called twice.

        Waits for the environment's own `close()`, unless the process is at work: it may hang.

        Raises:
            EnvError: If the environment's `close()` raised an exception.
        """
        if not self._free.detach():
            return
        self._forget()
        process, self._process = self._process, None
        try:
            if process is not None:
                is_idle = process.is_idle
                number = process.ask(self._seat, "close", (), self._settings.step_seconds)
                if is_idle:
                    with contextlib.suppress(WorkerLost):
                        process.wait(number)
                else:
                    process.forget(number)
        finally:
            self._worker.forget_seat(self._seat)

    def _ask_reset(self) -> None:
        self._forget()
        self._process = self._worker.process()
        self._number = self._process.ask(self._seat, "reset", self._start, self._settings.reset_seconds)

    def _forget(self) -> None:
        number, self._number = self._number, None
        if number is not None and self._process is not None:
            self._process.forget(number)

    def _wait(self) -> Any:
        number, self._number = self._number, None
        if number is None or self._process is None:
            raise EnvError("no request is pending; call reset_async or step_async first")
        return self._process.wait(number)
