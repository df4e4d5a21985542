"""Lazy loading of a package's modules, so that a command can reject invalid input before it loads torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def load_on_use(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Builds a package's `__getattr__` (PEP 562), which imports a name's module when the name is first used.

    Args:
        package: The package's `__name__`, for the error.
        modules: Public names that each module defines.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
