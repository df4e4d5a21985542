"""What every command uses: how it reads numbers, says what it did, and says what is wrong."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def parser_of(command: str, description: str) -> argparse.ArgumentParser:
    """Returns an empty parser for the words after `epo-trl COMMAND`."""
    return argparse.ArgumentParser(prog=f"epo-trl {command}", description=description)


def at_least(minimum: int) -> Any:
    """Returns an argparse type: an integer from `minimum`."""

    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"expected an integer >= {minimum}, got {value}")
        return value

    return integer


def need_file(out: str | None) -> None:
    """Raises `OSError` if what is to be written, `--out`, is a folder, or lies in a file."""
    if out is None:
        return
    if Path(out).is_dir():
        raise IsADirectoryError(f"--out: got {out}, which is a folder; expected a file")
    for parent in Path(out).parents:
        if parent.is_file():
            raise NotADirectoryError(f"--out: got {out}, but {parent} is a file; expected a file in a folder")


def say(text: str) -> None:
    """Writes a line to standard output."""
    sys.stdout.write(f"{text}\n")


def fail(error: Exception) -> int:
    """Writes an error as one line to standard error; returns exit code 1."""
    message = " ".join(str(error).split())
    sys.stderr.write(f"epo-trl: error: {message}\n")
    return 1
