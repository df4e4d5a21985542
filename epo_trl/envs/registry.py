"""From an environment's name in a config to the class of its settings, and from those to its tasks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

from epo_trl.envs.base import EnvError, TaskSuite
from epo_trl.envs.named import named_object

# A dataclass whose fields are the settings and whose `make_suite()` returns the task suite.
ENVIRONMENTS = {
    "alfworld": "epo_trl.envs.alfworld.arguments:AlfworldArguments",
    "gymnasium": "epo_trl.envs.adapters.gymnasium:GymnasiumArguments",
    "openenv": "epo_trl.envs.adapters.openenv:OpenEnvArguments",
    "scienceworld": "epo_trl.envs.scienceworld.arguments:ScienceWorldArguments",
    "tools": "epo_trl.envs.adapters.tools:ToolsArguments",
    "trap": "epo_trl.envs.trap:TrapArguments",
}


class EnvArguments(Protocol):
    """The settings of an environment, as fields of a dataclass.

    A class attribute `MAY_CHANGE` names those that do not change what is learned: a resumed run may have other values.
    A class method `check_early(given)` may raise `EnvError` before torch is loaded, from the settings as they are
    written: `{name: value}` of the config and the command line.
    """

    def make_suite(self) -> TaskSuite:
        """Returns the task suite."""


def environment_arguments(name: str, folder: Path | None = None) -> type[Any]:
    """Returns the dataclass of an environment's settings, see `EnvArguments`.

    Args:
        name: A key of `ENVIRONMENTS`, or `"module:Class"` for one that is not ours. The module is looked for in the
            current folder too.
        folder: Another folder to look in: the config's.

    Raises:
        EnvError: If there is no such environment, or it is no dataclass with `make_suite()`.
    """
    for place in dict.fromkeys([Path.cwd(), *([folder.resolve()] if folder else [])]):
        if str(place) not in sys.path:  # last, so that nothing in it hides a library
            sys.path.append(str(place))
    takes = ", ".join(map(repr, ENVIRONMENTS)) + " or 'module:Class'"
    found = named_object("environment", ENVIRONMENTS.get(name, name), takes)
    if not isinstance(found, type) or not hasattr(found, "make_suite"):
        mend = "takes a dataclass of settings with `def make_suite(self)`, which returns the TaskSuite"
        raise EnvError(f"environment: got {name!r}, which has no make_suite(); {mend} (docs/environments.md)")
    if not is_dataclass(found):
        raise EnvError(
            f"environment: got {name!r}, which is not a dataclass, so its settings are not known; write @dataclass "
            "above the class and a type at each field, for example `size: int = 3`"
        )
    return found


def check_fields(settings: type[Any], others: Iterable[type[Any]]) -> None:
    """Raises `EnvError` if a setting of an environment has the name of another option of the recipe."""
    owners = {"config": "every recipe", "help": "every recipe"}
    owners |= {field.name: other.__name__ for other in others for field in fields(other) if field.init}
    for field in fields(settings):
        if field.init and field.name in owners:
            raise EnvError(
                f"environment: {settings.__name__} has a field {field.name!r}, and so has {owners[field.name]}, so the "
                f"option --{field.name} would mean both; rename the field, for example to 'game_{field.name}'"
            )


def suite_of(settings: Any) -> TaskSuite:
    """Returns the suite that the settings make. Its `settings` are those that a resumed run has to share.

    Raises:
        EnvError: If a setting is unusable, or what was made is no `TaskSuite`.
    """
    suite, name = settings.make_suite(), type(settings).__name__
    if not isinstance(suite, TaskSuite):
        raise EnvError(
            f"environment: {name}.make_suite() returned {suite!r:.100}, takes an object of a class that derives from "
            "epo_trl.envs.TaskSuite"
        )
    if not isinstance(getattr(suite, "name", None), str) or not suite.name:
        raise EnvError(
            f"environment: the {type(suite).__name__} of {name} has no name; set the class attribute `name`, for "
            'example "my-game"; every reported number carries it'
        )
    suite.made_by = f"{type(settings).__module__}:{type(settings).__qualname__}"
    may_change = getattr(settings, "MAY_CHANGE", ())
    suite.settings = {
        field.name: getattr(settings, field.name) for field in fields(settings) if field.name not in may_change
    }
    return suite
