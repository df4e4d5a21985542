"""Looks up the settings class of an environment by its name in a config, and builds the task suite from it."""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from epo_trl.envs.base import EnvError, TaskSuite, is_setting

ENVIRONMENTS = {
    "alfworld": "epo_trl.envs.alfworld.alfworld_suite:AlfworldArguments",
    "gymnasium": "epo_trl.envs.gymnasium:GymnasiumArguments",
    "openenv": "epo_trl.envs.openenv:OpenEnvArguments",
    "scienceworld": "epo_trl.envs.scienceworld:ScienceWorldSuite",
    "tools": "epo_trl.envs.tools:ToolsArguments",
    "trap": "epo_trl.envs.trap:TrapSuite",
    "webshop": "epo_trl.envs.webshop:WebShopSuite",
}


def environment_arguments(name: str, folder: Path | None = None) -> type[Any]:
    """Returns the settings dataclass of an environment.

    Its fields are the options, and `make_suite()` returns the task suite. The class attribute `MAY_CHANGE`, if any,
    names the fields that do not change what is learned: a resumed run may change them.

    `name` is a key of `ENVIRONMENTS`, or `"module:Class"` for a user's environment. Its module is also searched in the
    current folder and in `folder`, that of the config.
    """
    for place in dict.fromkeys([Path.cwd(), *([folder.resolve()] if folder else [])]):
        if str(place) not in sys.path:  # last, so that nothing in it shadows a library
            sys.path.append(str(place))
    known = ", ".join(map(repr, ENVIRONMENTS)) + " or 'module:Class'"
    found = named_object("environment", ENVIRONMENTS.get(name, name), known)
    if not isinstance(found, type) or not is_dataclass(found) or not hasattr(found, "make_suite"):
        raise EnvError(
            "environment: expected a settings dataclass (write @dataclass above the class and a type at each field) "
            f"with `def make_suite(self)`, which returns the TaskSuite (docs/environments.md), got {name!r}"
        )
    return found


def named_object(field: str, name: str, expected: str) -> Any:
    """Imports the object that `"module:attribute"` names, which runs the module.

    In a recipe, the module is also searched in the current folder and the config's. The `EnvError` without such a
    module or attribute shows the config `field` and what was `expected`.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:  # the last for no module
        reason = f"{type(error).__name__}: {error}"
        raise EnvError(f"{field}: expected {expected}, got {name!r}, which cannot be imported ({reason})") from error


def build_suite(settings: Any) -> TaskSuite:
    """Builds the suite from its settings. Its attribute `settings` holds those that a resumed run has to share."""
    suite, name = settings.make_suite(), type(settings).__name__
    if not isinstance(suite, TaskSuite):
        raise EnvError(f"environment: expected {name}.make_suite() to return a TaskSuite, got {suite!r:.100}")
    vars(suite).update(  # an assignment fails if the suite is a frozen dataclass
        settings={f.name: getattr(settings, f.name) for f in fields(settings) if is_setting(f, settings)},
    )
    return suite
