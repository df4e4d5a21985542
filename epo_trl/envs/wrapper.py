"""A task suite that wraps another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epo_trl.envs.base import TaskSuite, TextEnv


class SuiteWrapper(TaskSuite):
    """A task suite that behaves like another one, except for what its class overrides.

    Attributes are not forwarded by name, so none can be forgotten: an attribute added to `TaskSuite` later comes from
    the wrapped suite, not from the default. Names with an underscore belong to each suite itself.

    Args:
        suite: Suite to wrap.
    """

    def __init__(self, suite: TaskSuite) -> None:
        self.suite = suite

    def __getattribute__(self, name: str) -> Any:
        """Returns attributes set here or defined below `TaskSuite`, and otherwise those of the wrapped suite."""
        get, mro = super().__getattribute__, type(self).__mro__
        own = mro[: mro.index(TaskSuite)]
        if name.startswith("_") or name in get("__dict__") or any(name in vars(part) for part in own):
            return get(name)
        return getattr(get("suite"), name)

    # Python requires the abstract methods to be defined.

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the wrapped suite's task ids."""
        return self.suite.task_ids(split)

    def make_env(self) -> TextEnv:
        """Creates an environment of the wrapped suite."""
        return self.suite.make_env()
