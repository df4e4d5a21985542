"""A task suite in front of another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epo_trl.envs.base import TaskSuite, TextEnv


class SuiteWrapper(TaskSuite):
    """A task suite that is another one in all that its class does not define itself.

    Nothing is forwarded by name, so nothing can be forgotten: what is new in `TaskSuite` is the other's too, not the
    default. Names with an underscore are each suite's own.

    Args:
        suite: The other one.
    """

    def __init__(self, suite: TaskSuite) -> None:
        self.suite = suite

    def __getattribute__(self, name: str) -> Any:
        """Returns what was set here or is defined below `TaskSuite`, else what the other suite has."""
        get, mro = super().__getattribute__, type(self).__mro__
        own = mro[: mro.index(TaskSuite)]
        if name.startswith("_") or name in get("__dict__") or any(name in vars(part) for part in own):
            return get(name)
        return getattr(get("suite"), name)

    # Python wants the abstract methods to be written.

    def task_ids(self, split: str) -> Sequence[str]:
        """As the other's."""
        return self.suite.task_ids(split)

    def make_env(self) -> TextEnv:
        """As the other's."""
        return self.suite.make_env()
