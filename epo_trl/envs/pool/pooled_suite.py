"""A task suite whose environments run in worker processes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from epo_trl.envs.base import EnvError, Faults, TaskSuite
from epo_trl.envs.pool.env import PooledEnv
from epo_trl.envs.pool.worker import PoolSettings, Worker


class PooledSuite(TaskSuite):
    """Wraps a task suite so that its environments run in worker processes, several in each.

    A worker that dies or exceeds a time limit is killed. Its episodes raise `WorkerLost`, and the next reset of any of
    its environments starts another process.

    All that is not defined or set here comes from the wrapped suite, including attributes that `TaskSuite` or its class
    may get later.

    Args:
        suite: Suite to wrap. It is pickled and sent to the workers, so its class must be importable there.
        settings: Settings of the pool.
    """

    def __init__(self, suite: TaskSuite, settings: PoolSettings | None = None) -> None:
        self.suite = suite
        self.pool = settings or PoolSettings()
        self.settings = suite.settings  # of the games in the workers, which have a copy of the suite
        self._workers = self._make_workers()

    def __getattribute__(self, name: str) -> Any:
        """Returns an attribute of this object or its class, names with an underscore included, or the suite's."""
        get = super().__getattribute__
        if name.startswith("_") or name in get("__dict__") or name in vars(PooledSuite):
            return get(name)
        return getattr(get("suite"), name)

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the wrapped suite's task ids."""  # TaskSuite requires the method
        return self.suite.task_ids(split)

    def make_env(self) -> PooledEnv:
        """Creates an environment in the worker that has the fewest."""
        return PooledEnv(min(self._workers, key=len), self.pool)

    def faults(self) -> Faults:
        """Returns the failure counts of the workers so far."""
        return sum((worker.faults for worker in self._workers), self.suite.faults())

    def _make_workers(self) -> list[Worker]:
        try:
            sent = pickle.dumps(self.suite)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise EnvError(f"suite: {self.suite.name!r} cannot be sent to a worker process: {error}") from error
        return [Worker(sent) for _ in range(self.pool.workers)]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_workers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._workers = self._make_workers()
