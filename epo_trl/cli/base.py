"""Parsers, number types, output and errors that all commands share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def make_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Creates an empty parser for the arguments after `epo-trl COMMAND`."""
    return argparse.ArgumentParser(prog=f"epo-trl {command}", description=description)


def at_least(minimum: int) -> Any:
    """Returns an argparse type: an integer >= `minimum`."""

    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"expected an integer >= {minimum}, got {value}")
        return value

    return integer


def need_file(out: str | None) -> None:
    """Raises `OSError` if the output file `--out` is a folder, or if one of its parents is a file."""
    if out is None:
        return
    if Path(out).is_dir():
        raise IsADirectoryError(f"--out: expected a file, got the folder {out}")
    for parent in Path(out).parents:
        if parent.is_file():
            raise NotADirectoryError(f"--out: expected a file in a folder, got {out}, but {parent} is a file")


def say(text: str) -> None:
    """Writes a line to standard output."""
    sys.stdout.write(f"{text}\n")


def fail(error: Exception) -> int:
    """Writes an error to standard error as one line; returns exit code 1."""
    message = " ".join(str(error).split())
    sys.stderr.write(f"epo-trl: error: {message}\n")
    return 1
