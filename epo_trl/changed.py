"""Attributes that have other values inside a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def changed(owner: Any, **values: Any) -> Iterator[None]:
    """Gives attributes of an object or a module these values until the end of the block."""
    own = {name: value for name, value in vars(owner).items() if name in values}  # others are those of the class
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)
