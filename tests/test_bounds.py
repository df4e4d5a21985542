"""Bounds in the types of fields: one check, one wording."""

import math
from dataclasses import dataclass, fields
from typing import Annotated

import pytest

from epo_trl.bounds import (
    Count,
    Finite,
    NonNegative,
    OneOf,
    Positive,
    PositiveShare,
    Range,
    Share,
    check_bounds,
    option,
    read_bounds,
)
from epo_trl.errors import InputError


@dataclass
class Settings:
    turns: Count = 5
    limit: Count | None = None
    weight: NonNegative = 0.0
    rate: Positive = 1.0
    share: Share = 0.5
    shift: Finite = 0.0
    kind: Annotated[str, OneOf(("a", "b"))] = "a"
    part: PositiveShare = 1.0
    decay: Annotated[float, Range(least=0, below=1)] = 0.0
    names: list[str] = option(lambda: ["x"], "Names of something.")
    free: int = -3


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("turns", 0, "expected an integer >= 1, got 0"),
        ("turns", None, "expected an integer >= 1, got None"),
        ("turns", 2.5, "expected an integer >= 1, got 2.5"),
        ("turns", True, "expected an integer >= 1, got True"),
        ("weight", "1", "expected a number >= 0, got '1'"),
        ("limit", 0, "expected an integer >= 1 or null, got 0"),
        ("weight", -0.1, "expected a number >= 0, got -0.1"),
        ("weight", math.nan, "expected a number >= 0, got nan"),
        ("weight", math.inf, "expected a number >= 0, got inf"),
        ("rate", 0.0, "expected a number > 0, got 0.0"),
        ("share", 1.5, "expected a number from 0 to 1, got 1.5"),
        ("shift", -math.inf, "expected a finite number, got -inf"),
        ("kind", "c", "expected one of 'a', 'b', got 'c'"),
        ("part", 0.0, "expected a number > 0 and <= 1, got 0.0"),
        ("decay", 1.0, "expected a number >= 0 and < 1, got 1.0"),
    ],
)
def test_a_value_outside_its_bounds_is_named(name, value, expected):
    with pytest.raises(InputError) as caught:
        check_bounds(Settings(**{name: value}))
    assert str(caught.value) == f"{name}: {expected}"


def test_the_ends_are_inside():
    check_bounds(Settings(turns=1, limit=1, weight=0, rate=1e-9, share=0))
    check_bounds(Settings(share=1.0, kind="b", free=-9))


def test_fields_of_another_library_have_bounds_too():
    with pytest.raises(InputError, match="free: expected an integer >= 1, got -3"):
        check_bounds(Settings(), {"free": Count})


def test_bounds_are_read_from_the_class():
    bounds = {name: str(each.bounds) for name, each in read_bounds(Settings).items()}
    assert bounds == {
        "turns": ">= 1", "limit": ">= 1", "weight": ">= 0", "rate": "> 0", "share": "from 0 to 1", "shift": "finite",
        "kind": "one of 'a', 'b'", "part": "> 0 and <= 1", "decay": ">= 0 and < 1",
    }  # fmt: skip
    assert str(Range(-2, 1e12)) == "from -2 to 1e+12" and str(Range(above=0, below=1)) == "> 0 and < 1"


def test_an_option_has_a_help_text_and_a_default_of_its_own():
    settings, other = Settings(), Settings()
    settings.names.append("y")
    assert (settings.names, other.names, fields(Settings)[-2].metadata["help"]) == (
        ["x", "y"],
        ["x"],
        "Names of something.",
    )
