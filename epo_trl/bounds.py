"""Options as fields of a dataclass, with bounds in their types: checked in one place, shown in the help.

@dataclass
class Settings:
    turns: Count = option(50, "Maximum number of turns.")
    limit: Count | None = None
    share: Share = 0.5
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

from epo_trl.errors import InputError

_type_hints = cache(get_type_hints)


@dataclass(frozen=True)
class Range:
    """A range of finite numbers.

    Args:
        least: Smallest number.
        most: Largest number.
        above: Number below the range, which is not part of it; by default minus infinity.
        below: Number above the range, which is not part of it; by default infinity.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __contains__(self, value: Any) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        if self.least > -math.inf and self.most < math.inf:
            return f"from {self.least:g} to {self.most:g}"
        ends = {">=": self.least, ">": self.above, "<=": self.most, "<": self.below}
        return " and ".join(f"{sign} {end:g}" for sign, end in ends.items() if math.isfinite(end)) or "finite"


class OneOf(tuple[Any, ...]):
    """A fixed choice."""

    def __str__(self) -> str:
        return f"one of {', '.join(map(repr, self))}"


T = TypeVar("T")
Bounds = Range | OneOf
Count = Annotated[int, Range(least=1)]
CountOrZero = Annotated[int, Range(least=0)]
NonNegative = Annotated[float, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
Finite = Annotated[float, Range()]
Share = Annotated[float, Range(least=0, most=1)]
PositiveShare = Annotated[float, Range(above=0, most=1)]


def option(default: Any, text: str) -> Any:
    """Declares a field that is an option of a program.

    Args:
        default: Default, or a function that makes one for each object.
        text: Text of the help.
    """
    made: Any = {"default_factory" if callable(default) else "default": default}
    return field(**made, metadata={"help": text})


class FieldBounds(NamedTuple):
    """Bounds of a field, the type of its numbers, and whether `None` is valid."""

    bounds: Bounds
    kind: type
    is_optional: bool


def read_bounds(hints: Mapping[str, Any] | type) -> dict[str, FieldBounds]:
    """Reads the bounds from the types of fields, for those that have bounds.

    Args:
        hints: Types by name, or the dataclass that defines them.
    """
    if isinstance(hints, type):
        hints = _type_hints(hints, include_extras=True)
    found = {}
    for name, hint in hints.items():
        for part in (hint, *get_args(hint)):
            for bounds in getattr(part, "__metadata__", ()):
                if isinstance(bounds, Bounds):
                    found[name] = FieldBounds(bounds, get_args(part)[0], part is not hint)
    return found


def check_bounds(config: Any, others: Mapping[str, Any] | None = None) -> None:
    """Raises `InputError` for the first field that is outside its bounds.

    Args:
        config: A dataclass with bounds in the types of its fields.
        others: Types with bounds, such as `Count | None`, of fields that another library defines.
    """
    for name, (bounds, kind, is_optional) in {**read_bounds(type(config)), **read_bounds(others or {})}.items():
        value = getattr(config, name)
        is_choice, numbers = isinstance(bounds, OneOf), int if kind is int else int | float
        has_type = is_choice or (isinstance(value, numbers) and not isinstance(value, bool))
        if (value is None and is_optional) or (has_type and value in bounds):
            continue
        noun = "" if is_choice else "an integer " if kind is int else "a number "
        expected = "a finite number" if bounds == Range() else f"{noun}{bounds}"
        raise InputError(f"{name}: expected {expected}{' or null' * is_optional}, got {value!r}")


def read_mapping(name: str, value: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Returns the value of a field with `name: value` pairs, which are JSON on a command line; none for `None`.

    Raises:
        InputError: If it is neither a mapping nor a JSON object.
    """
    found, reason = value or {}, ""
    try:
        found = json.loads(found) if isinstance(found, str) else found
    except ValueError as error:
        reason = f" ({error})"
    if not isinstance(found, Mapping):
        raise InputError(f"{name}: expected 'name: value' pairs, as JSON on a command line, got {value!r}{reason}")
    return dict(found)


def copy_options(kind: type[T], options: Any, **others: Any) -> T:
    """Creates an object of another dataclass with the values of the fields that both have.

    Args:
        kind: Dataclass of the result.
        options: Dataclass object to copy from.
        **others: Values of the other fields, or of those that differ.
    """
    own = {entry.name for entry in fields(options)}
    shared = {entry.name for entry in fields(kind) if entry.name in own}  # type: ignore[arg-type]
    return kind(**{name: getattr(options, name) for name in shared} | others)
