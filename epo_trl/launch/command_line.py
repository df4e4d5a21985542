"""Reads the parts of a command line that are needed before the options are known."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from epo_trl.errors import InputError

HELP_ALL = "--help-all"
HELP = {"-h", "--help", HELP_ALL}
CHECK = "--check"
TRACEBACK = "--traceback"  # shows the traceback of errors that are otherwise one line


class ConfigIsRight(Exception):  # noqa: N818 - not an error: it ends a recipe that only checks its config
    """Raised by `--check` when the config is valid."""


class RecipeError(InputError):
    """The command line or the config of a recipe is invalid. The message is for the user."""


def with_config_apart(argv: Sequence[str]) -> list[str]:
    """Splits `--config=FILE` into the two words that TRL expects.

    Raises:
        RecipeError: If `--config` occurs more than once, or without a file.
    """
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if words.count("--config") > 1:
        raise RecipeError("--config: expected one YAML file, got more than one")
    if words[-1:] == ["--config"]:
        raise RecipeError("--config: expected a YAML file, got nothing")
    return words


def config_path(argv: Sequence[str]) -> Path | None:
    """Returns the file after `--config`, if any."""
    return Path(argv[argv.index("--config") + 1]) if "--config" in argv else None


def read_config(path: Path) -> dict[str, Any]:
    """Reads a YAML file.

    Raises:
        RecipeError: If it cannot be read, or does not contain options.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise RecipeError(f"--config: expected a readable YAML file, got {path}: {error}") from error
    if not isinstance(config, dict):
        raise RecipeError(f"--config: expected a YAML file with 'name: value' pairs, got {path}")
    return config


def early_option(name: str, argv: Sequence[str] | None = None) -> str | None:
    """Returns the value of an option that decides which others exist, from the command line or else the config."""
    argv = with_config_apart(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", dest="value", nargs="?")  # the real parser rejects a missing value
    given = parser.parse_known_args(argv)[0].value
    path = config_path(argv)
    if given is None and path is not None:
        given = read_config(path).get(name)
    return None if given is None else str(given)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the most similar known one, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def refuse_unknown(
    unknown: Sequence[str],
    known: Iterable[str],
    why: str = "unknown option; --help-all lists all, abbreviations are not supported",
) -> None:
    """Raises `RecipeError` for the first unknown option, if there is one."""
    if unknown:
        raise RecipeError(f"{unknown[0]}: {why}{did_you_mean(unknown[0], known)}")
