"""From a command line and its YAML file to a task suite and config objects.

`read_command_line` reads both once and finds environment and algorithm, which decide what other options exist.
`parse_options` reads these with TRL's parser. A config of the package is known by its name.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trl import TrlParser

from epo_trl.bounds import option
from epo_trl.cli.base import did_you_mean
from epo_trl.envs.registry import ENVIRONMENTS, build_suite, environment_arguments
from epo_trl.errors import InputError
from epo_trl.yaml_files import read_yaml

# A link to the folder `recipes` in the repository, a copy of its configs in an installed package.
RECIPES = Path(__file__).parents[1] / "recipes"
HELP, HELP_ALL = {"-h", "--help"}, "--help-all"
NOTHING: Mapping[str, str] = {}
EPILOG = f"""{HELP_ALL} adds the options of TRL and transformers, such as --learning_rate. --check [FILE ...] only
checks the options, or configs. --traceback shows the traceback of every error. accelerate launch starts several
processes: --accelerate_config NAME_OR_FILE, --num_processes, --num_machines, --machine_rank, --main_process_ip,
--main_process_port."""


@dataclass
class AlgorithmArguments:
    """Training algorithm."""

    algorithm: str = option("grpo", "'grpo', or 'ppo' with a critic. epo_lambda=0 disables the EPO terms.")


@dataclass(frozen=True)
class CommandLine:
    """A command line, and the content of its YAML file, if any.

    With `check_only` the program ends after checking the options.
    """

    options: Sequence[str]
    config: Path | None
    values: Mapping[str, Any]
    environment: str
    algorithm: str
    check_only: bool = False
    program: str = "epo-trl"


class ConfigIsValid(Exception):  # noqa: N818 - not an error: it ends a program that only checks its config
    """Raised when all options are valid and the command line only asks for the check."""


def read_command_line(
    argv: Sequence[str], *, check_only: bool = False, program: str = "epo-trl", fixed: Mapping[str, str] = NOTHING
) -> CommandLine:
    """Reads a command line, without the program, and the YAML file after `--config`.

    `fixed` are the environment and algorithm of a recipe for one of each, whatever the config says. If there is no such
    config, it raises `InputError`.
    """
    first = argparse.ArgumentParser(program, add_help=False, allow_abbrev=False)
    for name in ("config", "environment", "algorithm"):
        first.add_argument(f"--{name}")
    given, _ = first.parse_known_args(argv)
    config = find_config(given.config) if given.config else None
    values = read_yaml(config, "--config") if config else {}
    chosen = {**values, **{name: value for name, value in vars(given).items() if value is not None}, **fixed}
    environment, algorithm = chosen.get("environment") or "", chosen.get("algorithm", AlgorithmArguments.algorithm)
    options = [*argv, *(f"--{name}={value}" for name, value in fixed.items())]
    return CommandLine(options, config, values, environment, algorithm, check_only, program)


def parse_options(line: CommandLine, *types: type) -> tuple[Any, ...]:
    """Parses a command line into the task suite and one object per type. Ends the program for `--help`.

    The settings of the environment are further fields. An unknown name is an error.

    Raises:
        ConfigIsValid: If all is valid and `line` only asks for the check.
        EnvError: If there is no such environment, or one of its settings is invalid.
        InputError: If the command line or the config is invalid.
    """
    parser = RecipeParser(line, types)
    try:
        found = parser.parse_args_into_dataclasses(parser.words, look_for_args_file=False)
    except (ValueError, OSError) as error:  # of a dataclass that rejects a value, or cannot read the file that it names
        raise InputError(str(error)) from error
    suite = build_suite(found[0])
    if line.check_only:
        raise ConfigIsValid
    return suite, *found[1 : 1 + len(types)]


def read_settings(line: CommandLine, *types: type) -> dict[str, Any]:
    """Returns the options as plain values, defaults included, for programs that inspect a run without starting it."""
    from epo_trl.trainers.config import settle_defaults

    parser = RecipeParser(line, types)
    given, _ = parser.parse_known_args(parser.words)
    settle_defaults(given)
    return vars(given)


class RecipeParser(TrlParser):
    """TRL's parser: one option per field of the dataclasses. Its errors name the option, without abbreviations.

    A value of the YAML file is read as on the command line, where a word is also a list of one, except for lists,
    mappings and null.

    Attributes:
        words: The words to parse.
    """

    def __init__(self, line: CommandLine, types: Sequence[type]):
        settings = []
        if line.environment or {*HELP, HELP_ALL}.isdisjoint(line.options):
            settings = [environment_arguments(line.environment, line.config.parent if line.config else None)]
        super().__init__(
            (*settings, *types),
            prog=line.program,
            allow_abbrev=False,
            usage="%(prog)s --config FILE [--option value ...]",
            epilog=EPILOG,
        )
        known = f"One of {', '.join(ENVIRONMENTS)}, or 'module:Class'."
        self.add_argument("--environment", default="", help=known)
        whole = {name: value for name, value in line.values.items() if isinstance(value, list | dict | None)}
        unknown = self.set_defaults_with_config(**whole)
        typed = (f"--{name}={value}" for name, value in line.values.items() if name not in whole)
        self.words = [*unknown, *typed, *line.options]
        self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file of `option: value`")
        self.add_argument(HELP_ALL, action="help", default=argparse.SUPPRESS, help=argparse.SUPPRESS)

        self.is_brief = HELP_ALL not in line.options

    def format_help(self) -> str:
        """Returns one screen, the names and defaults of the package's options, or with `--help-all` argparse's text."""
        if not self.is_brief:
            return super().format_help()
        hidden = {"help", "help_all", "config", *names_of_others(self.dataclass_types)}
        defaults = {action.dest: action.default for action in reversed(self._actions)}  # --no_NAME comes after --NAME
        shown = (f"{name}={value}".replace(" ", "") for name, value in reversed(defaults.items()) if name not in hidden)
        return "\n".join([
            f"usage: {self.prog} --config FILE [--option value ...]",
            f"\nOptions and their defaults; docs/config.md explains them, and {HELP_ALL}, also those of TRL:\n",
            textwrap.fill("  ".join(shown), 110, break_long_words=False, break_on_hyphens=False),
            f"\n{EPILOG}\n",
        ])  # fmt: skip

    def error(self, message: str) -> NoReturn:
        """Raises an error of argparse as `InputError`."""
        raise InputError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Returns the values and an empty rest: an unknown option is an error."""
        given, rest = super().parse_known_args(args, namespace)
        if rest:
            name = rest[0].partition("=")[0]
            known = [f"--{action.dest}" for action in self._actions]
            self.error(f"{name}: no option of {self.prog}{did_you_mean(name, known)}")
        return given, rest


def names_of_others(types: Iterable[type]) -> set[str]:
    """Returns the names of the fields that TRL and transformers define, and nobody else again."""
    theirs: set[str] = set()
    ours: set[str] = set()
    for base in (base for kind in types for base in kind.__mro__):
        names = theirs if base.__module__.partition(".")[0] in ("trl", "transformers") else ours
        names.update(vars(base).get("__annotations__", {}))
    return theirs - ours


# ----------------------------------------------------------------------------------------------- configs by their name


def builtin_configs() -> dict[str, Path]:
    """Returns all configs by name, such as `"alfworld/tiny_cpu"`."""
    return {config_name(path): path for path in sorted(RECIPES.glob("*/*.yaml"))}


def config_name(path: Path) -> str:
    """Returns the name of a built-in config, or the path of another file."""
    return path.relative_to(RECIPES).with_suffix("").as_posix() if path.is_relative_to(RECIPES) else str(path)


def list_configs(command: str) -> dict[str, Path]:
    """Returns the configs of `epo-trl train`, `sft` or `evaluate`; the latter's names begin with `sft` and `eval`."""
    commands = {"sft": "sft", "eval": "evaluate"}
    every = builtin_configs().items()
    return {name: path for name, path in every if commands.get(path.stem.partition("_")[0], "train") == command}


def find_config(name: str) -> Path:
    """Finds a config: the file of that path, or else the built-in config of that name; `InputError` if neither is."""
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
