"""The options that decide which others exist: environment and algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from epo_trl.envs.base import EnvError
from epo_trl.envs.registry import ENVIRONMENTS
from epo_trl.launch.command_line import HELP, RecipeError, early_option

ALGORITHM_NAMES = ("grpo", "ppo")


@dataclass
class EnvironmentArguments:
    """Environment of the tasks."""

    environment: str = field(default="", metadata={"help": f"One of {', '.join(ENVIRONMENTS)}, or 'module:Class'."})


@dataclass
class AlgorithmArguments:
    """Training algorithm."""

    algorithm: str = field(
        default="grpo", metadata={"help": "'grpo', or 'ppo' with a critic. epo_lambda=0 disables the EPO terms."}
    )


def environment_name(argv: Sequence[str], only: str | None = None) -> str | None:
    """Returns the name of the environment, or `None` for `--help` without one.

    Args:
        argv: Command line.
        only: Environment of a recipe for one environment, which its config may omit.

    Raises:
        EnvError: If neither the recipe, the command line nor the config names one.
        RecipeError: If the command line or the config names another than the recipe.
    """
    given = early_option("environment", argv) or only
    _refuse_other("environment", given, only)
    if given is None and HELP.isdisjoint(argv):
        known = ", ".join(ENVIRONMENTS)
        raise EnvError(
            f"environment: expected one of {known} or 'module:Class', in the YAML or as an option, got nothing"
        )
    return given


def algorithm_name(argv: Sequence[str] | None = None, only: str | None = None) -> str:
    """Returns the name of the algorithm, one of `ALGORITHM_NAMES`.

    Args:
        argv: Command line; by default that of the program.
        only: Algorithm of a recipe for one algorithm, which its config may omit.

    Raises:
        RecipeError: If the name is unknown, or another than that of the recipe.
    """
    name = early_option("algorithm", argv) or only or AlgorithmArguments.algorithm
    _refuse_other("algorithm", name, only)
    if name not in ALGORITHM_NAMES:
        raise RecipeError(f"algorithm: expected one of {', '.join(map(repr, ALGORITHM_NAMES))}, got {name!r}")
    return name


def _refuse_other(name: str, given: str | None, only: str | None) -> None:
    if only is not None and given != only:
        raise RecipeError(
            f"{name}: expected {only!r}, which this recipe trains, got {given!r}; recipes/train.py trains any config"
        )
