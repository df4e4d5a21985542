"""From `module:attribute` in a user's config to what it names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from epo_trl.envs.base import EnvError


def named_object(field: str, name: str, takes: str) -> Any:
    """Returns what `"module:attribute"` names.

    Only what a user has written into a config is given here: importing a module runs it.

    Args:
        field: Of the config, for messages.
        name: The module is looked for where Python looks, and in the current folder and the config's if a recipe runs.
        takes: What the field takes, for messages.

    Raises:
        EnvError: If there is no such module or nothing of that name in it.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise EnvError(f"{field}: got {name!r}, takes {takes}")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise EnvError(
            f"{field}: got {name!r}, which cannot be imported ({type(error).__name__}: {error}); takes {takes}, "
            "from the current folder, the config's, or an installed package"
        ) from error
