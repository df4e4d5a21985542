"""From an environment's name in a config to the class of its settings."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

from epo_trl.envs.base import EnvError, TaskSuite

# A dataclass whose fields are the settings and whose `make_suite()` returns the task suite.
ENVIRONMENTS = {
    "alfworld": "epo_trl.envs.alfworld.arguments:AlfworldArguments",
    "scienceworld": "epo_trl.envs.scienceworld.arguments:ScienceWorldArguments",
}


class EnvArguments(Protocol):
    """The settings of an environment, as fields of a dataclass.

    A class attribute `MAY_CHANGE` names those that do not change what is learned: a resumed run may have other values.
    """

    def make_suite(self) -> TaskSuite:
        """Returns the task suite."""


def environment_arguments(name: str) -> type[Any]:
    """Returns the dataclass of an environment's settings, see `EnvArguments`.

    Args:
        name: A key of `ENVIRONMENTS`, or `"module:Class"` for one that is not ours.

    Raises:
        EnvError: If there is no such environment.
    """
    module, _, attribute = ENVIRONMENTS.get(name, name).partition(":")
    takes = ", ".join(map(repr, ENVIRONMENTS)) + " or 'module:Class'"
    if not attribute:
        raise EnvError(f"environment: got {name!r}, takes {takes}")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise EnvError(f"environment: got {name!r}, which cannot be imported ({error}); takes {takes}") from error
    if not hasattr(found, "make_suite"):
        raise EnvError(f"environment: got {name!r}, which has no make_suite(); see epo_trl.envs.registry.EnvArguments")
    return found
