"""Bounds in the types of fields: one check, one wording."""

import math
import re
from dataclasses import dataclass
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
    read_bounds,
)
from epo_trl.cli.evaluation import EvaluationArguments
from epo_trl.cli.imitation import DemonstrationArguments, ImitationConfig
from epo_trl.envs.scienceworld import ScienceWorldSuite
from epo_trl.envs.trap import TrapSuite
from epo_trl.envs.webshop import WebShopSuite
from epo_trl.errors import InputError
from epo_trl.evaluation import Protocol
from epo_trl.lab.credit_audit import AuditPlan
from epo_trl.methods import METHODS
from epo_trl.methods.adaptive import AdaptiveEntropy
from epo_trl.methods.dapo import DAPO
from epo_trl.methods.decision_bonus import DecisionBonus
from epo_trl.methods.epo import EPOConstantBeta, EPODecay
from epo_trl.methods.gated import Gated
from epo_trl.methods.registry import load_class
from epo_trl.rollout import RolloutSettings
from epo_trl.rollout.spec import FewShotArguments
from epo_trl.trainers import EPOConfig, EPOPPOConfig
from epo_trl.trainers.config import THEIR_BOUNDS


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
    free: int = -3


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("turns", 0, "expected an integer >= 1, got 0"),
        ("turns", 2.5, "expected an integer >= 1, got 2.5"),
        ("turns", True, "expected an integer >= 1, got True"),
        ("weight", "1", "expected a number >= 0, got '1'"),
        ("limit", 0, "expected an integer >= 1 or null, got 0"),
        ("weight", -0.1, "expected a number >= 0, got -0.1"),
        ("weight", math.nan, "expected a number >= 0, got nan"),
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
    check_bounds(Settings(turns=1, limit=10**400, weight=0, rate=1e-9, share=0))
    check_bounds(Settings(share=1.0, kind="b", free=-9))


def test_bounds_are_read_from_the_class():
    bounds = {name: str(each.bounds) for name, each in read_bounds(Settings).items()}
    assert bounds == {
        "turns": ">= 1", "limit": ">= 1", "weight": ">= 0", "rate": "> 0", "share": "from 0 to 1", "shift": "finite",
        "kind": "one of 'a', 'b'", "part": "> 0 and <= 1", "decay": ">= 0 and < 1",
    }  # fmt: skip
    assert str(Range(-2, 1e12)) == "from -2 to 1e+12" and str(Range(above=0, below=1)) == "> 0 and < 1"


# --------------------------------------------------------------------------------- the classes of this package

MADE_OF = {
    Protocol: {"name": "p", "max_turns": 3, "history_length": 2, "temperature": 1.0},
    EPOConfig: {"output_dir": "x", "use_cpu": True, "bf16": False},
    EPOPPOConfig: {"output_dir": "x", "use_cpu": True, "bf16": False, "num_generations": 1},
    ImitationConfig: {"output_dir": "x", "use_cpu": True, "bf16": False},
    AdaptiveEntropy: {"target": 1.0},
    DAPO: {"max_completion_length": 8},
    DecisionBonus: {"weight": 0.1, "threshold": 1.0},
    EPODecay: {"max_turns": 3, "over": "turns", "end_weight": 0.0},
    EPOConstantBeta: {"beta_k": 1.0},
    Gated: {"threshold": 1.0, "weight": 1.0},
}
SETTINGS = [
    AuditPlan,
    DemonstrationArguments,
    EvaluationArguments,
    FewShotArguments,
    RolloutSettings,
    ScienceWorldSuite,
    TrapSuite,
    WebShopSuite,
]
METHOD_CLASSES = {load_class(slot, name) for slot, names in METHODS.items() for name in names}


def outside(bounds):
    """Returns values just outside of bounds."""
    if isinstance(bounds, OneOf):
        return ["none of these"]
    ends = [bounds.least - 1, bounds.most + 1, bounds.above, bounds.below]
    return [end for end in ends if math.isfinite(end)] or [math.inf]


@pytest.mark.parametrize("kind", sorted({*MADE_OF, *SETTINGS, *METHOD_CLASSES}, key=lambda kind: kind.__name__))
def test_each_field_of_a_class_is_checked_when_an_object_is_made(kind):
    bounded = read_bounds(kind) | (read_bounds(THEIR_BOUNDS) if issubclass(kind, EPOConfig) else {})
    for name, field in bounded.items():
        for value in outside(field.bounds):
            with pytest.raises(InputError, match=f"^{name}: expected .*, got {re.escape(repr(value))}"):
                kind(**{**MADE_OF.get(kind, {}), name: value})
