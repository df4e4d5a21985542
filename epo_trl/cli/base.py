"""Parsers, number types, output and errors that all commands share."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from epo_trl.errors import EpoTrlError, one_line

SECONDS_BEFORE_OTHER_RANKS = 60.0
TRACEBACK = "--traceback"  # shows the traceback of errors that are otherwise one line


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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the most similar known one, or nothing."""
    near = difflib.get_close_matches(name.lstrip("-"), [each.lstrip("-") for each in known], n=1, cutoff=0.75)
    return f"; did you mean {'--' * name.startswith('-')}{near[0]}?" if near else ""


def say(text: str) -> None:
    """Writes a line to standard output."""
    sys.stdout.write(f"{text}\n")


def progress_bar(total: int, name: str) -> Any:
    """Returns a bar over episodes, which the first rank shows unless `TQDM_DISABLE` is set."""
    from tqdm.auto import tqdm

    hidden = {"disable": True} if rank() else {}  # `disable: False` would override TQDM_DISABLE
    return tqdm(total=total, desc=name, unit="episode", **hidden)


def rank() -> int:
    """Returns the rank of this process among those of a launcher."""
    return int(os.environ.get("RANK", "0"))


def fail(error: Exception | str, begin: str = "epo-trl: error") -> int:
    """Writes an error to standard error as one line; returns exit code 1."""
    if rank():  # usually all ranks have the same error, and the launcher ends the others after the first
        time.sleep(SECONDS_BEFORE_OTHER_RANKS)
    text = f"{one_line(begin)}: {one_line(error)}"
    if "tqdm" in sys.modules:  # on a line of its own, below a bar
        sys.modules["tqdm"].tqdm.write(text, file=sys.stderr)
    else:
        sys.stderr.write(f"{text}\n")
    return 1


def run_program(begin: str, body: Callable[[], object], options: Sequence[str]) -> int:
    """Calls a program and returns its exit code. An error for the user is printed as one line; others are raised.

    `--traceback` among the options raises every error.
    """
    try:
        return int(body() or 0)  # type: ignore[call-overload]
    except (EpoTrlError, OSError) as error:
        if TRACEBACK in options:
            raise
        return fail(error, begin)
