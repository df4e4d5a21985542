"""Imports the object that a `module:attribute` in a user's config names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from epo_trl.envs.base import EnvError


def named_object(field: str, name: str, expected: str) -> Any:
    """Imports the object that `"module:attribute"` names.

    Pass only names that the user has written into a config: importing a module runs it.

    Args:
        field: Config field, for error messages.
        name: Name to import. The module is searched on Python's path; in a recipe also in the current folder and the
            config's.
        expected: Expected value of the field, for error messages.

    Raises:
        EnvError: If there is no such module or it has no such attribute.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise EnvError(f"{field}: expected {expected}, got {name!r}")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise EnvError(
            f"{field}: expected {expected} from the current folder, the config's, or an installed package, got "
            f"{name!r}, which cannot be imported ({type(error).__name__}: {error})"
        ) from error
