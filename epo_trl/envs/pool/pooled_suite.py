"""A task suite whose environments run in worker processes."""

from __future__ import annotations

import contextlib
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

from epo_trl.envs.base import NOT_RUNNING, AsyncTextEnv, EnvError, Faults, Info, TaskSuite
from epo_trl.envs.pool.worker import PoolSettings, Worker, WorkerLost, WorkerProcess


class PooledEnv(AsyncTextEnv):
    """An environment in a worker process. Its calls raise `WorkerLost` if the process died or hung."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._seat = worker, worker.take_seat()
        self._free = weakref.finalize(self, worker.forget_seat, self._seat)
        self._process: WorkerProcess | None = None  # the process with the running episode

    def reset_async(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Starts a reset; `reset_wait` returns its result. If the process is lost, the reset is retried in another."""
        if not self._free.alive:
            raise EnvError("reset: the environment is closed; create another")
        self._process, self._pending = None, self._worker.submit(self._worker.reset, self._seat, seed, options)

    def reset_wait(self) -> tuple[str, Info]:
        """Returns the result of `reset_async`."""
        self._process, answer = self._requested()
        return answer

    def step_async(self, action: str) -> None:
        """Starts a step; `step_wait` returns its result."""
        if self._process is None:
            raise EnvError(NOT_RUNNING)
        self._pending = self._worker.submit(self._worker.step, self._process, self._seat, action)

    def reseed(self, seed: int) -> None:
        """Seeds the random numbers of the environment in its process."""
        self._worker.submit(self._worker.reseed, self._seat, seed).result()

    def close(self) -> None:
        """Closes the environment and, with a worker's last one, stops the process. May be called twice.

        Waits for the environment's own `close()`, unless the process is at work: it may hang.

        Raises:
            EnvError: If the environment's `close()` raised an exception.
        """
        if not self._free.detach():
            return
        self._process = self._pending = None
        try:
            is_idle, closing = self._worker.is_idle, self._worker.submit(self._worker.close_env, self._seat)
            if is_idle:
                with contextlib.suppress(WorkerLost):
                    closing.result()
        finally:
            self._worker.forget_seat(self._seat)


class PooledSuite(TaskSuite):
    """Wraps a task suite so that its environments run in worker processes, several in each.

    A worker that dies or exceeds a time limit is killed. Its episodes raise `WorkerLost`, and the next reset of any of
    its environments starts another process.

    The suite is pickled and sent to the workers, so its class must be importable there. All that is not defined or set
    here comes from it, including attributes that `TaskSuite` or its class may get later.
    """

    def __init__(self, suite: TaskSuite, settings: PoolSettings | None = None) -> None:
        self.suite = suite
        self.pool = settings or PoolSettings()
        self.settings = suite.settings  # of the games in the workers, which have a copy of the suite
        sent = pickle.dumps(suite)
        self._workers = [Worker(sent, self.pool) for _ in range(self.pool.workers)]

    def __getattribute__(self, name: str) -> Any:
        """Returns an attribute of this object or its class, names with an underscore included, or the suite's."""
        get = super().__getattribute__
        if name.startswith("_") or name in get("__dict__") or name in vars(PooledSuite):
            return get(name)
        return getattr(get("suite"), name)

    def task_ids(self, split: str) -> Sequence[str]:  # TaskSuite requires the method
        """Returns the wrapped suite's task ids."""
        return self.suite.task_ids(split)

    def make_env(self) -> PooledEnv:
        """Creates an environment in the worker that has the fewest."""
        return PooledEnv(min(self._workers, key=len))

    def faults(self) -> Faults:
        """Returns the failure counts of the workers so far."""
        return sum((worker.faults for worker in self._workers), self.suite.faults())

    def __reduce__(self) -> tuple[Any, ...]:
        return PooledSuite, (self.suite, self.pool)
