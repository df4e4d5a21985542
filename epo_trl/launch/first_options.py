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

    environment: str = field(metadata={"help": f"One of {', '.join(ENVIRONMENTS)}, or 'module:Class'."})


@dataclass
class AlgorithmArguments:
    """Training algorithm."""

    algorithm: str = field(
        default="grpo", metadata={"help": "'grpo', or 'ppo' with a critic. epo_lambda=0 disables the EPO terms."}
    )


def environment_name(argv: Sequence[str]) -> str | None:
    """Returns the name of the environment, or `None` for `--help` without one.

    Raises:
        EnvError: If neither the command line nor the config names one.
    """
    given = early_option("environment", argv)
    if given is None and HELP.isdisjoint(argv):
        known = ", ".join(ENVIRONMENTS)
        raise EnvError(
            f"environment: expected one of {known} or 'module:Class', in the YAML or as an option, got nothing"
        )
    return given


def algorithm_name(argv: Sequence[str] | None = None) -> str:
    """Returns the name of the algorithm, one of `ALGORITHM_NAMES`.

    Raises:
        RecipeError: If the name is unknown.
    """
    name = early_option("algorithm", argv) or AlgorithmArguments.algorithm
    if name not in ALGORITHM_NAMES:
        raise RecipeError(f"algorithm: expected one of {', '.join(map(repr, ALGORITHM_NAMES))}, got {name!r}")
    return name
