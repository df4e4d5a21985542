"""Reads a command line and its YAML file once, before the other options are known: environment and algorithm decide
which others exist. Finds and lists the configs that come with the package, and the warm starts of RL configs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

from epo_trl.bounds import option
from epo_trl.cli.base import did_you_mean
from epo_trl.envs.base import EnvError
from epo_trl.envs.registry import ENVIRONMENTS
from epo_trl.errors import InputError
from epo_trl.yaml_files import read_yaml

HELP_ALL = "--help-all"
HELP = {"-h", "--help", HELP_ALL}
ALGORITHM_NAMES = ("grpo", "ppo")
# A link to the folder `recipes` in the repository, a copy of its configs in an installed package.
RECIPES = Path(__file__).parents[1] / "recipes"
PREFIXES = {"train": "", "sft": "sft_", "evaluate": "eval_"}  # of the names of a command's configs


@dataclass
class EnvironmentArguments:
    """Environment of the tasks."""

    environment: str = option("", f"One of {', '.join(ENVIRONMENTS)}, or 'module:Class'.")


@dataclass
class AlgorithmArguments:
    """Training algorithm."""

    algorithm: str = option("grpo", "'grpo', or 'ppo' with a critic. epo_lambda=0 disables the EPO terms.")


@dataclass(frozen=True)
class CommandLine:
    """A command line and its YAML file.

    Args:
        options: Options for the parser of the program.
        config: Path of the YAML file, if any.
        values: Content of the YAML file.
        environment: Name of the environment; `None` for `--help` without one.
        algorithm: One of `ALGORITHM_NAMES`.
        check_only: Whether the program ends after checking the options.
        program: Name of the program in its help; `None` for the name of the script.
    """

    options: Sequence[str]
    config: Path | None
    values: Mapping[str, Any]
    environment: str | None
    algorithm: str
    check_only: bool = False
    program: str | None = None


class ConfigIsValid(Exception):  # noqa: N818 - not an error: it ends a program that only checks its config
    """Raised when all options are valid and the command line only asks for the check."""


class FirstParser(argparse.ArgumentParser):
    """Reads some options and leaves the others. Create it with `add_help=False` and `allow_abbrev=False`."""

    def error(self, message: str) -> NoReturn:
        """Raises an error of argparse as `InputError`."""
        raise InputError(message)


def read_command_line(
    argv: Sequence[str], environment: str | None = None, algorithm: str | None = None, check_only: bool = False
) -> CommandLine:
    """Reads a command line and the YAML file after `--config`.

    Args:
        argv: Command line without the program.
        environment: Environment of a recipe for one environment, which the config may omit.
        algorithm: Algorithm of a recipe for one algorithm, which the config may omit.
        check_only: See `CommandLine`.

    Raises:
        EnvError: If there is no environment.
        InputError: If the config or the algorithm is unknown, or the algorithm is not the recipe's.
    """
    parser = FirstParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?", action="append", default=[])
    parser.add_argument("--environment")
    parser.add_argument("--algorithm")
    given, options = parser.parse_known_args(argv)
    if len(given.config) > 1 or None in given.config:
        got = "nothing" if None in given.config else "more than one"
        raise InputError(f"--config: expected a YAML file, or the name of a built-in config, got {got}")
    config = find_config(given.config[0]) if given.config else None
    values = read_yaml(config, "--config") if config else {}
    chosen = {}
    for name, only in (("environment", environment), ("algorithm", algorithm)):
        typed = getattr(given, name)
        options += [] if typed is None else [f"--{name}={typed}"]
        chosen[name] = str(typed or values.get(name) or only or "")
        if only is not None and chosen[name] != only:
            raise InputError(
                f"{name}: expected {only!r}, which this recipe trains, got {chosen[name]!r}; recipes/train.py trains "
                "any config"
            )
    if not chosen["environment"] and HELP.isdisjoint(options):
        raise EnvError(
            f"environment: expected one of {', '.join(ENVIRONMENTS)} or 'module:Class', in the YAML or as an option, "
            "got nothing"
        )
    name = chosen["algorithm"] or AlgorithmArguments.algorithm
    if name not in ALGORITHM_NAMES:
        raise InputError(f"algorithm: expected one of {', '.join(map(repr, ALGORITHM_NAMES))}, got {name!r}")
    return CommandLine(options, config, values, chosen["environment"] or None, name, check_only)


def builtin_configs() -> dict[str, Path]:
    """Returns all configs by name, such as `"alfworld/tiny_cpu"`."""
    return {config_name(path): path for path in sorted(RECIPES.glob("*/*.yaml"))}


def config_name(path: Path) -> str:
    """Returns the name of a built-in config, or the path of another file."""
    return path.relative_to(RECIPES).with_suffix("").as_posix() if path.is_relative_to(RECIPES) else str(path)


def list_configs(command: str) -> dict[str, Path]:
    """Returns the configs that `epo-trl train`, `sft` or `evaluate` lists; none for other commands."""
    others = tuple(prefix for name, prefix in PREFIXES.items() if name != command and prefix)
    return {
        name: path
        for name, path in builtin_configs().items()
        if command in PREFIXES and path.name.startswith(PREFIXES[command]) and not path.name.startswith(others)
    }


def find_config(name: str) -> Path:
    """Finds a config: the file of that path, or else the built-in config of that name.

    Raises:
        InputError: If neither exists.
    """
    for path in (Path(name), RECIPES / f"{name.removesuffix('.yaml')}.yaml"):
        if path.is_file():
            return path
    raise InputError(
        f"--config: expected a YAML file, or the name of a built-in config such as 'alfworld/tiny_cpu', got "
        f"{name!r}{did_you_mean(name, builtin_configs())}"
    )


def find_warm_start(config: Path) -> Path | None:
    """Returns the warm-start config next to an RL config, if any: `sft_NAME.yaml`, also for `ppo_NAME.yaml`."""
    beside = config.with_name(f"sft_{config.name.removeprefix('ppo_')}")
    return beside if beside.is_file() else None


def warm_start_command(warm_start: Path) -> str:
    """Returns the command that makes a warm start."""
    return f"epo-trl sft --config {config_name(warm_start)}"


@dataclass(frozen=True)
class Program:
    """A recipe as a program: a file of the repository, or a command of the package.

    Args:
        name: Name in messages.
        find_configs: Finds the configs to list, by the name that the user types.
        one: Command for one process, up to `--config`.
        several: Command for several processes, with placeholders: `{settings}`, the name of a file in
            `accelerate_configs`, and `{processes}`, the option for their number.
        environment: Environment of a recipe for one environment.
        algorithm: Algorithm of a recipe for one algorithm.
    """

    name: str
    find_configs: Callable[[], Mapping[str, Path]]
    one: str
    several: str
    environment: str | None = None
    algorithm: str | None = None

    @cached_property
    def configs(self) -> Mapping[str, Path]:
        """The configs to list, by the name that the user types."""
        return self.find_configs()


def recipe_file(
    recipe: Path, patterns: Sequence[str], environment: str | None = None, algorithm: str | None = None
) -> Program:
    """Creates the program of a recipe file; `patterns` are those of its configs, relative to its own folder."""

    def find_configs() -> dict[str, Path]:
        found = {path for pattern in patterns for path in recipe.parent.glob(f"{pattern}.yaml")}
        return {str(path): path for path in sorted(found)}

    launch = f"accelerate launch --config_file accelerate_configs/{{settings}}.yaml{{processes}} {recipe}"
    return Program(recipe.name, find_configs, f"python {recipe}", launch, environment, algorithm)


def builtin_command(name: str) -> Program:
    """Creates the program of a command of the package."""
    command = f"epo-trl {name}"
    launch = f"{command} --accelerate_config {{settings}}{{processes}}"
    return Program(command, partial(list_configs, name), command, launch)


def overview(program: Program, gpus: int) -> str:
    """Formats the list of configs, each with the first sentence of its file, and the commands for a machine.

    A config with its own warm start has two commands.
    """
    width = max(map(len, program.configs), default=0)
    lines = [f"{program.name} needs a config:"]
    lines += [f"  {typed:{width}}  {_about(path)}" for typed, path in program.configs.items()]
    lines.append(f"For this machine, where torch finds {({0: 'no GPU', 1: 'one GPU'}).get(gpus, f'{gpus} GPUs')}:")
    fitting = program.configs.get(_config_for(program, gpus))
    warm_start = find_warm_start(fitting) if fitting else None
    lines += [f"  {warm_start_command(warm_start)}"] if warm_start else []
    return "\n".join([*lines, f"  {command(program, gpus)}", "Options: --help, --help-all\n"])


def command(program: Program, gpus: int) -> str:
    """Returns the command for a machine with `gpus` GPUs."""
    config = _config_for(program, gpus)
    if config not in program.configs or "cpu" in program.configs[config].stem:
        return f"{program.one} --config {config}"
    settings = "single_gpu" if gpus == 1 else "zero3"
    processes = "" if gpus in (1, 8) else f" --num_processes {gpus}"
    return f"{program.several.format(settings=settings, processes=processes)} --config {config}"


def _config_for(program: Program, gpus: int) -> str:
    size = "cpu" if gpus == 0 else "1gpu" if gpus == 1 else "8gpu"
    stems = {typed: path.stem for typed, path in program.configs.items()}
    fitting = [typed for typed in stems if size in stems[typed]] or [typed for typed in stems if "cpu" in stems[typed]]
    return min(fitting, key=lambda typed: len(stems[typed]), default="FILE")


def _about(path: Path) -> str:
    sentence = re.match(r"# (.+?\.)(?=\s)", path.read_text(encoding="utf-8"))
    return sentence[1] if sentence else ""
