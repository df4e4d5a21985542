"""Parses the options of a program and its YAML file into a task suite and config objects, with readable help."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from transformers import HfArgumentParser, TrainingArguments

from epo_trl.bounds import Range, read_bounds, read_mapping
from epo_trl.cli.base import did_you_mean, rank
from epo_trl.cli.command_line import (
    HELP_ALL,
    CommandLine,
    ConfigIsValid,
    EnvironmentArguments,
    config_name,
)
from epo_trl.envs.registry import build_suite, check_fields, environment_arguments
from epo_trl.errors import InputError
from epo_trl.trainers.config import settle_defaults

WIDTH = 120  # columns of a line in the short help
_THEIRS = {"trl": 1, "transformers": 2}  # packages whose options come last in the help
_MAY_BE_FILES = {"deepspeed", "fsdp_config", "accelerator_config"}  # options that are `name: value` pairs or their file
# Options that mark a command's configs, and the other programs that read those of `epo-trl train`.
_COMMANDS = {
    "algorithm": "train", "episodes": "sft", "mistake_rate": "sft", "thoughts": "sft", "keep_lost": "sft",
    "parallel": "evaluate", "splits": "evaluate", "output": "evaluate", "compare_to": "evaluate",
}  # fmt: skip
_READ_TRAINING = ("epo-trl memory", "epo-trl audit-credit")
_GENERAL = "general"  # options of no class; the short help shows them first, without a heading


def parse_options(line: CommandLine, *types: type) -> tuple[Any, ...]:
    """Parses a command line into the task suite and one object per type. Ends the program for `--help`.

    The settings of the environment are further fields. An unknown key is an error.

    Raises:
        ConfigIsValid: If all is valid and `line` only asks for the check.
        EnvError: If the environment or one of its settings is invalid.
        InputError: If the command line or the config is invalid.
    """
    parser = RecipeParser(line, types)
    given, _ = parser.parse_known_args(line.options)
    _check_device(given, line.config)
    settle_defaults(given)
    try:
        chosen, *rest = [
            each(**{entry.name: getattr(given, entry.name) for entry in fields(each) if entry.init})
            for each in parser.dataclass_types[1:]
        ]
    except (ValueError, OSError) as error:  # of a dataclass that rejects a value, or cannot read the file that it names
        raise InputError(str(error)) from error
    suite = build_suite(chosen)
    if line.check_only:
        raise ConfigIsValid
    return suite, *rest


def read_settings(line: CommandLine, *types: type) -> dict[str, Any]:
    """Returns the options as plain values, defaults included, for programs that inspect a run without starting it."""
    given, _ = RecipeParser(line, types).parse_known_args(line.options)
    settle_defaults(given)
    return vars(given)


class RecipeParser(HfArgumentParser):
    """A parser whose errors name the option, without abbreviations, and with help grouped by class.

    `--help` shows the options of this package, one line each, and `--help-all` the whole help of all options. The
    values of the YAML file are the defaults.

    Raises:
        InputError: If the YAML file has an unknown name, or a value of the wrong type.
    """

    def __init__(self, line: CommandLine, types: Iterable[type]):
        self._line = line
        folder = line.config.parent if line.config else None
        settings = [environment_arguments(line.environment, folder)] if line.environment else []
        for each in settings:
            check_fields(each, (EnvironmentArguments, *types))
        super().__init__(
            (EnvironmentArguments, *settings, *types),
            prog=line.program,
            allow_abbrev=False,
            usage="%(prog)s --config FILE [--option value ...]",
            formatter_class=_ShortOptions,
        )
        self._check_values()
        self._check_choices()
        for action in self._actions:
            if action.dest in line.values:
                value = line.values[action.dest]
                is_word = action.nargs == "+" and action.type is str and isinstance(value, str)
                action.default, action.required = [value] if is_word else value, False  # as on the command line
        self.set_defaults(environment=line.environment)
        help_config = "YAML file of `option: value`; the command line overrides it"
        self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=help_config)
        help_all = "show all options, with those of TRL and transformers"
        self.add_argument(HELP_ALL, action="store_true", default=argparse.SUPPRESS, help=help_all)

    def error(self, message: str) -> NoReturn:
        """Raises an error of argparse as `InputError`."""
        raise InputError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Returns the values and an empty rest: an unknown option is an error. Ends the program for `--help-all`."""
        if HELP_ALL in self._line.options:
            if rank() == 0:
                sys.stdout.write(self.format_help_all())
            self.exit()
        given, rest = super().parse_known_args(args, namespace)
        known = {option for action in self._actions for option in action.option_strings}
        if unknown := [word.split("=", 1)[0] for word in rest if word.startswith("--")] or rest:
            advice = "--help-all lists all, abbreviations are not supported"
            self.error(f"{unknown[0]}: unknown option; {advice}{did_you_mean(unknown[0], known)}")
        self._check_pairs(given)
        return given, rest

    def _check_pairs(self, given: argparse.Namespace) -> None:
        """Raises `InputError` for a string that is not JSON in place of `name: value` pairs; strips white space.

        An environment's field may have a meaning for other strings.
        """
        hints = {name: hint for kind in self.dataclass_types for name, hint in get_type_hints(kind).items()}
        configs = [kind for kind in self.dataclass_types if issubclass(kind, TrainingArguments)]
        only_pairs = {entry.name for kind in configs for entry in fields(kind)} - _MAY_BE_FILES
        for name, value in vars(given).items():
            may_be_pairs = "dict" in str(hints.get(name)) and isinstance(value, str)
            if may_be_pairs and (name in only_pairs or value.startswith("{")):
                read_mapping(name, value)
                setattr(given, name, value.strip() or "{}")

    def _check_values(self) -> None:
        """Raises `InputError` for an unknown name in the YAML file, or a value of the wrong type."""
        values, config = self._line.values, self._line.config
        if config is None:
            return
        known = {action.dest for action in self._actions} - {"help"}
        unknown = [key for key in values if key not in known]
        trained = [key for key in unknown if key in {entry.name for entry in fields(TrainingArguments)}]
        if trained and not any(issubclass(kind, TrainingArguments) for kind in self.dataclass_types):
            raise InputError(
                f"--config: expected the config of an evaluation{_evaluation_config(config)}, got "
                f"{config_name(config)}, the config of a training run ({trained[0]}: {values[trained[0]]})"
            )
        for key in unknown:
            if other := _COMMANDS.get(key):
                name = config_name(config)
                reads_training = self.prog in _READ_TRAINING
                advice = "a config of epo-trl train" if reads_training else f"epo-trl {other} --config {name}"
                raise InputError(
                    f"{key}: expected an option of {self.prog}, got one of epo-trl {other} in {name}; use {advice}"
                )
        if unknown:
            raise InputError(f"{unknown[0]}: unknown in {config_name(config)}{did_you_mean(unknown[0], known)}")
        check_types(values, self.dataclass_types, config)

    def _check_choices(self) -> None:
        """Raises `InputError` for a word of the YAML file that is none of its option's choices."""
        for action in self._actions:
            value = self._line.values.get(action.dest)
            words = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
            known = [str(choice) for choice in action.choices or ()]
            if known and (wrong := [word for word in words if word not in known]):
                names = ", ".join(map(repr, known))
                raise InputError(f"{action.dest}: expected one of {names}, got {wrong[0]!r}")

    def print_help(self, file: Any = None) -> None:
        """Prints the help on the first rank only."""
        if rank() == 0:
            super().print_help(file)

    def format_help(self) -> str:
        """Returns the short help: usage, then our options by the class that defines them, one line each.

        Left out are the negations of bool options, `--no_NAME`.
        """
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [], [])
        lines = [formatter.format_help().rstrip()]
        for heading, actions in self._groups:
            if heading.partition(":")[0] not in _THEIRS:
                shown = [action for action in actions if action.const is not False]
                lines += [f"{heading.rstrip(':')}:"] if heading != _GENERAL else []
                lines += map(_in_one_line, shown)
        lines.append(f"{HELP_ALL} adds the options of TRL and transformers: --learning_rate, --max_steps, ...")
        return "\n".join(lines) + "\n"

    def format_help_all(self) -> str:
        """Returns the help of all options by the class that defines them, those of this package first."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [], [])
        for heading, actions in self._groups:
            formatter.start_section(heading)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()

    @cached_property
    def _groups(self) -> list[tuple[str, list[argparse.Action]]]:
        """The options by the class that defines them. Adds their bounds to the help, once."""
        bounds = {name: each.bounds for kind in self.dataclass_types for name, each in read_bounds(kind).items()}
        by_name: dict[str, list[argparse.Action]] = {}
        for action in self._actions:
            if isinstance(bounds.get(action.dest), Range):
                action.help = f"({bounds[action.dest]}) {action.help}"
            by_name.setdefault(action.dest, []).append(action)
        groups: dict[type, list[argparse.Action]] = {}
        for config in self.dataclass_types:
            for entry in fields(config):
                if entry.init:
                    groups.setdefault(_home(config, entry.name), []).extend(by_name.pop(entry.name))
        lineage = [base for config in self.dataclass_types for base in config.__mro__]
        ordered = sorted(groups, key=lambda home: (_THEIRS.get(_package(home), 0), lineage.index(home)))
        rest = [action for actions in by_name.values() for action in actions]
        return [(_GENERAL, rest), *((_heading(home), groups[home]) for home in ordered)]


# Names of pydantic's errors, and the value that the user should write.
_EXPECTED = {
    "bool_type": "true or false", "int_type": "an integer", "float_type": "a number", "string_type": "a string",
    "literal_error": "a string", "is_instance_of": "a string", "list_type": "a list",
    "dict_type": "'name: value' pairs", "tuple_type": "another field type, such as list[...], since YAML has no tuples",
}  # fmt: skip


def check_types(values: Mapping[str, Any], classes: Iterable[type], config: Path) -> None:
    """Rejects values of a YAML file whose type is not that of their field. Strings are left to the parser.

    Raises:
        InputError: If a value has the wrong type. The message names the field, the expected type and the value.
    """
    for each in classes:
        hints = get_type_hints(each)
        for entry in fields(each):
            value = values.get(entry.name, "")
            if isinstance(value, str) or (value is None and entry.default is None):
                continue
            kind = TypeAdapter(hints[entry.name], config=ConfigDict(arbitrary_types_allowed=True))
            try:
                kind.validate_python(value, strict=True)
            except ValidationError as error:
                expected = " or ".join(dict.fromkeys(_expected(one["type"], one["loc"]) for one in error.errors()))
                hint = ""
                if "a string" in expected and isinstance(value, bool):
                    hint = "; YAML reads no, yes, on and off as true or false: put the word in quotes"
                elif "a string" in expected and isinstance(value, int | float):
                    hint = "; put the word in quotes"
                if isinstance(value, float) and value.is_integer() and "an integer" in expected:
                    hint = f"; write {value:.0f}"
                where = config_name(config)
                raise InputError(f"{entry.name}: expected {expected}, got {value!r} in {where}{hint}") from error


def _expected(error: str, place: Sequence[int | str]) -> str:
    expected = _EXPECTED.get(error, error)
    return f"a list, each element {expected}" if any(isinstance(part, int) for part in place) else expected


def _home(config: type, name: str) -> type:
    """Returns the most derived class that defines a field."""
    return next(base for base in config.__mro__ if name in vars(base).get("__annotations__", {}))


def _package(home: type) -> str:
    return home.__module__.partition(".")[0]


def _heading(home: type) -> str:
    package = _package(home)
    if package in _THEIRS:
        return f"{package}: {home.__name__}"
    return f"{home.__name__}: {(home.__doc__ or '').strip().splitlines()[0].rstrip('.')}"


def _in_one_line(action: argparse.Action) -> str:
    """Formats an option with the beginning of its help."""
    default = "" if action.default in (None, "", argparse.SUPPRESS) or action.nargs == 0 else f"[{action.default}] "
    text = " ".join((action.help or "").replace("%%", "%").split())
    name = next(option for option in action.option_strings if option.startswith("--"))
    return f"  {name:32} {textwrap.shorten(default + text, WIDTH - 35, placeholder=' ...')}"


class _ShortOptions(argparse.ArgumentDefaultsHelpFormatter):
    """Shows --some_option without its alias --some-option."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or isinstance(action, argparse._HelpAction):
            return super()._format_action_invocation(action)
        name = action.option_strings[0]
        return name if action.nargs == 0 else f"{name} {self._format_args(action, action.dest.upper())}"


def _check_device(given: argparse.Namespace, config: Path | None) -> None:
    """Raises `InputError` if the config needs a GPU and the machine has none."""
    wanted = [name for name in ("bf16", "fp16") if getattr(given, name, None)]
    if not wanted or given.use_cpu or torch.accelerator.is_available():
        return
    name, advice = wanted[0], "set use_cpu: true and bf16: false"
    if config is not None:
        beside = [path for path in sorted(config.parent.glob("*tiny_cpu*.yaml")) if _prefix(path) == _prefix(config)]
        advice = f"use --config {config_name(beside[0])}, or {advice}" if beside else advice
    raise InputError(f"{name}: expected false on a machine without a GPU, got true; {advice}")


def _evaluation_config(config: Path) -> str:
    """Names the evaluation config for a training config, else another in its folder; `""` if there is none."""
    own = f"eval_{config.name.removeprefix('sft_').removeprefix('ppo_')}"
    beside = sorted(
        config.parent.glob("eval_*.yaml"), key=lambda path: (path.name != own, "cpu" not in path.name, path)
    )
    return f", such as {config_name(beside[0])}" if beside else ""


def _prefix(config: Path) -> str:
    """Returns the prefix of a config's name, which marks its command or algorithm; empty for GRPO."""
    return "".join(re.findall(r"^(?:sft|eval|ppo)_", config.name))
