"""Parses the command line and a YAML file into a task suite and config objects, with readable help."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import TrainingArguments
from trl import TrlParser

from epo_trl.envs.registry import build_suite, check_fields, environment_arguments
from epo_trl.launch.builtin_configs import shown
from epo_trl.launch.command_line import (
    CHECK,
    HELP_ALL,
    ConfigIsRight,
    RecipeError,
    config_path,
    read_config,
    refuse_unknown,
    with_config_apart,
)
from epo_trl.launch.first_options import EnvironmentArguments, environment_name
from epo_trl.launch.yaml_types import check_kinds
from epo_trl.trainers.config import settle_defaults


def parse_recipe(*types: type, environment: str | None = None, argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parses the command line and the YAML file after `--config` into the task suite and one object per type.

    The settings of the environment are further fields. An unknown key is an error.

    Args:
        types: Dataclasses, as for TRL's `TrlParser`.
        environment: Environment of a recipe for one environment, which the config may omit. Other recipes need
            `environment: NAME` in the config or on the command line.
        argv: Command line without the program.

    Raises:
        EnvError: If the environment or one of its settings is invalid.
        RecipeError: If the command line or the config is invalid.
        ConfigIsRight: If all is valid and `--check` is set.
    """
    argv = with_config_apart(sys.argv[1:] if argv is None else argv)
    check_only, argv = CHECK in argv, [word for word in argv if word != CHECK]
    environment = environment_name(argv, environment)
    path = config_path(argv)
    settings = environment_arguments(environment, path.parent if path else None) if environment else None
    if settings is not None:
        check_fields(settings, (EnvironmentArguments, *types))
    parser = RecipeParser((EnvironmentArguments, *([settings] if settings else []), *types), config=path)
    if environment:
        parser.set_defaults(environment=environment)  # for a config that omits it
    _, chosen, *rest = parser.parse_args_and_config(argv)  # ends the program for --help
    suite = build_suite(chosen)
    if check_only:
        raise ConfigIsRight
    return suite, *rest


class RecipeParser(TrlParser):
    """TRL's parser, with errors that name the option, no abbreviations, and help grouped by class.

    `--help` shows the options of this package, one line each, and `--help-all` the whole help of all options.

    Args:
        types: Dataclasses.
        config: Path of the YAML file, for messages.
    """

    def __init__(self, types: Iterable[type], config: Path | None = None):
        self._config = config
        super().__init__(
            types,
            allow_abbrev=False,
            usage="%(prog)s --config FILE [--option value ...]",
            description="The YAML file sets options as `option: value`; the command line overrides it.",
            formatter_class=_ShortOptions,
        )
        self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file with options")
        self.add_argument(HELP_ALL, action=_HelpAll, help="show all options, with those of TRL and transformers")

    def error(self, message: str) -> NoReturn:
        """Raises an error of argparse as `RecipeError`."""
        raise RecipeError(message)

    def parse_args_and_config(self, args: Iterable[str] | None = None, *rest: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Returns one object per type. Raises errors of their own checks as `RecipeError`."""
        if self._config is not None:
            read_config(self._config)
        try:
            return super().parse_args_and_config(args, *rest, **kwargs)
        except RecipeError:
            raise
        except ValueError as error:
            raise RecipeError(str(error)) from error

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Makes the values of the config the defaults. Raises `RecipeError` for an unknown name."""
        assert self._config is not None
        known = {action.dest for action in self._actions} - {"help", "help_all", "config"}
        unknown = [key for key in kwargs if key not in known]
        trained = [key for key in unknown if key in {entry.name for entry in fields(TrainingArguments)}]
        if trained and not any(issubclass(kind, TrainingArguments) for kind in self.dataclass_types):
            raise RecipeError(
                f"--config: expected the config of an evaluation, such as {_to_play(self._config)}, got "
                f"{shown(self._config)}, the config of a training run ({trained[0]}: {kwargs[trained[0]]})"
            )
        refuse_unknown(unknown, known, f"unknown in {shown(self._config)}")
        check_kinds(kwargs, self.dataclass_types, str(shown(self._config)))
        return super().set_defaults_with_config(**kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Returns the values and an empty rest: an unknown option is an error."""
        given, rest = super().parse_known_args(args, namespace)
        known = {option for action in self._actions for option in action.option_strings}
        options = [word.split("=", 1)[0] for word in rest if word.startswith("--")]
        refuse_unknown(options or rest, known)
        for name, value in vars(given).items():
            if isinstance(value, str) and value.startswith("{"):
                self._check_mapping(name, value)
        _check_device(given, self._config)
        settle_defaults(given)
        return given, rest

    def _check_mapping(self, name: str, value: str) -> None:
        try:
            json.loads(value)
        except ValueError as error:
            self.error(f"{name}: expected 'name: value' pairs as JSON, got {value!r} ({error})")

    def print_help(self, file: Any = None) -> None:
        """Prints the help on the first rank only."""
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)

    def format_help(self) -> str:
        """Returns the short help: usage, then our options by the class that defines them, one line each."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [], [])
        lines = [formatter.format_help().rstrip(), self.description or ""]
        for heading, actions in self._groups():
            if heading.partition(":")[0] not in _THEIRS:
                lines += [f"{heading.rstrip(':')}:", *(_in_one_line(action) for action in actions)]
        lines.append(f"{HELP_ALL} adds the options of TRL and transformers: --learning_rate, --max_steps, ...")
        return "\n".join(lines) + "\n"

    def format_help_all(self) -> str:
        """Returns the help of all options by the class that defines them, those of this package first."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(self.description)
        for heading, actions in self._groups():
            formatter.start_section(heading)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()

    def _groups(self) -> list[tuple[str, list[argparse.Action]]]:
        by_name: dict[str, list[argparse.Action]] = {}
        for action in self._actions:
            by_name.setdefault(action.dest, []).append(action)
        groups: dict[type, list[argparse.Action]] = {}
        for config in self.dataclass_types:
            for entry in fields(config):
                if entry.init:
                    groups.setdefault(_home(config, entry.name), []).extend(by_name.pop(entry.name))
        lineage = [base for config in self.dataclass_types for base in config.__mro__]
        ordered = sorted(groups, key=lambda home: (_THEIRS.get(_package(home), 0), lineage.index(home)))
        rest = [action for actions in by_name.values() for action in actions]
        return [("general", rest), *((_heading(home), groups[home]) for home in ordered)]


WIDTH = 120  # columns of a line in the short help
_THEIRS = {"trl": 1, "transformers": 2}


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


class _HelpAll(argparse.Action):
    """Prints the help of all options and ends the program."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, RecipeParser)
        if os.environ.get("RANK", "0") == "0":
            sys.stdout.write(parser.format_help_all())
        parser.exit()


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
    """Raises `RecipeError` if the config needs a GPU and the machine has none."""
    wanted = [name for name in ("bf16", "fp16") if getattr(given, name, None)]
    if not wanted or given.use_cpu or torch.accelerator.is_available():
        return
    name, advice = wanted[0], "set use_cpu: true and bf16: false"
    if config is not None:
        beside = [path for path in sorted(config.parent.glob("*tiny_cpu*.yaml")) if _kind(path) == _kind(config)]
        advice = f"use --config {shown(beside[0])}, or {advice}" if beside else advice
    raise RecipeError(f"{name}: expected false on a machine without a GPU, got true; {advice}")


def _to_play(config: Path) -> str:
    """Returns the evaluation config for a training config, else another in its folder, or a shipped one."""
    own = f"eval_{config.name.removeprefix('sft_').removeprefix('ppo_')}"
    beside = sorted(
        config.parent.glob("eval_*.yaml"), key=lambda path: (path.name != own, "cpu" not in path.name, path)
    )
    return shown(beside[0]) if beside else "alfworld/eval_tiny_cpu"


def _kind(config: Path) -> str:
    """Returns the prefix of a config's name, which marks its command or algorithm; empty for GRPO."""
    return "".join(re.findall(r"^(?:sft|eval|ppo)_", config.name))
