"""Writes small files atomically: each is complete or absent."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

from epo_trl.errors import FileError, InputError


def write_state(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Writes a JSON file atomically: a crash leaves either the old content or the new."""
    write_atomically(path, json.dumps(state))


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file in the same way, and creates its folder.

    Raises:
        FileError: If it cannot be written: the disk or a quota is full, or the file would be too large.
    """
    partial = f"{os.fspath(path)}.partial"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            os.remove(partial)
        raise FileError(f"{os.fspath(path)} cannot be written ({error.strerror or error})") from error


def read_state(path: str | os.PathLike[str], *keys: str) -> dict[str, Any]:
    """Reads a file written by `write_state`, which must have the keys.

    Raises:
        ValueError: If the file cannot be read or is damaged. The message names it.
    """
    try:
        with open(path, encoding="utf-8") as file:
            state = json.load(file)
    except OSError as error:
        raise InputError(f"{os.fspath(path)} cannot be read ({error.strerror}): is it a folder of epo_trl?") from error
    except (ValueError, RecursionError) as error:  # neither JSON nor UTF-8
        raise InputError(f"{os.fspath(path)} is damaged ({error})") from error
    if not isinstance(state, dict) or not state.keys() >= set(keys):
        raise InputError(f"{os.fspath(path)} is damaged (it has no {', '.join(keys) or 'fields'})")
    return state
