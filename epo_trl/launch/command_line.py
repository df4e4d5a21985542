"""The words of a command line, before it is known which options there are."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

HELP = {"-h", "--help"}
CHECK = "--check"


class ConfigIsRight(Exception):  # noqa: N818 - no error: it ends a recipe that was asked to read its config only
    """The config could be read, and that was all that was asked for."""


class RecipeError(ValueError):
    """The command line or the config of a recipe is wrong. The message is for whoever typed it."""


def with_config_apart(argv: Sequence[str]) -> list[str]:
    """Returns the command line with `--config=FILE` as the two words that TRL looks for.

    Raises:
        RecipeError: If there is more than one, or a name is missing.
    """
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if words.count("--config") > 1:
        raise RecipeError("--config: expected one YAML file, got more than one")
    if words[-1:] == ["--config"]:
        raise RecipeError("--config: expected a YAML file, got nothing")
    return words


def config_path(argv: Sequence[str]) -> Path | None:
    """Returns the file after `--config`."""
    return Path(argv[argv.index("--config") + 1]) if "--config" in argv else None


def read_config(path: Path) -> dict[str, Any]:
    """Returns what a YAML file says.

    Raises:
        RecipeError: If it cannot be read, or holds no list of options.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise RecipeError(f"--config: got {path}, which cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise RecipeError(f"--config: got {path}, which holds no list of 'name: value'")
    return config


def early_option(name: str, argv: Sequence[str] | None = None) -> str | None:
    """Returns what the command line or else the config says of an option that decides which others there are."""
    argv = with_config_apart(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", dest="value", nargs="?")  # what lacks a value, the real parser refuses
    given = parser.parse_known_args(argv)[0].value
    path = config_path(argv)
    if given is None and path is not None:
        given = read_config(path).get(name)
    return None if given is None else str(given)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the known one that is most like it, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def refuse_unknown(
    unknown: Sequence[str], known: Iterable[str], why: str = "unknown; options are written out, --help lists them"
) -> None:
    """Raises `RecipeError` about the first of the unknown options, if there are any."""
    if unknown:
        raise RecipeError(f"{unknown[0]}: {why}{did_you_mean(unknown[0], known)}")
