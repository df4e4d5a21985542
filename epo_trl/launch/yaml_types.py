"""Checks the types of the values in a YAML file."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from epo_trl.launch.command_line import RecipeError

_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "a list",
          dict: "'name: value' pairs", type(None): "null"}  # fmt: skip


def check_kinds(config: Mapping[str, Any], classes: Iterable[type], where: str) -> None:
    """Rejects values of another type than their field. Strings are left to the parser.

    Args:
        config: Values of the YAML file, by option.
        classes: Dataclasses whose fields are the options.
        where: Name of the file, for the message.

    Raises:
        RecipeError: If a value has the wrong type. The message names the field, the expected type and the value.
    """
    for each in classes:
        hints = get_type_hints(each)
        for field in fields(each):
            if field.name in config:
                _check(field, config[field.name], _members(hints[field.name]), where)


def _check(field: Field[Any], value: Any, members: list[Any], where: str) -> None:
    kinds = {_kind_of(member) for member in members} | ({type(None)} if field.default is None else set())
    parts = {_kind_of(part) for member in members if _kind_of(member) is list for part in get_args(member)}
    right = _is_of(value, kinds)
    if right and isinstance(value, list) and parts:
        right = all(_is_of(one, parts) for one in value)
    if not right:
        listed = [text for kind, text in _KINDS.items() if kind in kinds]
        quotes = isinstance(value, bool) and str in kinds
        hint = "; YAML reads no, yes, on and off as true or false: put the word in quotes" if quotes else ""
        raise RecipeError(f"{field.name}: expected {' or '.join(listed)}, got {value!r} in {where}{hint}")


def _is_of(value: Any, kinds: set[type | None]) -> bool:
    """Whether a value has one of the types. A string may be parsed as any of them."""
    is_number = type(value) is int and float in kinds
    return isinstance(value, str) or None in kinds or type(value) in kinds or is_number


def _members(hint: Any) -> list[Any]:
    return [*get_args(hint)] if get_origin(hint) in (Union, types.UnionType) else [hint]


def _kind_of(hint: Any) -> type | None:
    """Returns the type of a part of a hint, or `None` if any value may be valid."""
    origin = get_origin(hint) or hint
    if origin is Literal or (isinstance(origin, type) and issubclass(origin, Enum)):
        return str
    if origin in (tuple, set, frozenset) or getattr(origin, "__module__", "") == "collections.abc":
        return None
    return origin if origin in _KINDS else None
