"""Files of a run: its state, complete checkpoints, and the identity of a model's weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from epo_trl.errors import FileError, InputError

STATE_FILE = "epo_state.json"  # in every checkpoint, written last: without it the checkpoint is incomplete
FINISHED = "_finished.json"  # in the output folder of a run, written last
_NO_WEIGHTS = "training_args.bin"  # transformers writes it beside the weights
_READERS = 8  # files read in parallel; a single reader does not saturate a network disk


def is_complete(folder: str | os.PathLike[str]) -> bool:
    """Returns whether all files of a checkpoint were written."""
    return os.path.isfile(os.path.join(folder, STATE_FILE))


def flush(folder: str | os.PathLike[str]) -> None:
    """Flushes all files of a folder to disk."""
    for path in [*Path(folder).rglob("*"), Path(folder)]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Returns the folders `checkpoint-<step>`, complete or not, the newest last."""
    found = [path for path in Path(folder).glob("checkpoint-*") if path.is_dir() and step_of(path) >= 0]
    return sorted(found, key=step_of)


def step_of(path: str | os.PathLike[str]) -> int:
    """Parses the optimizer step from the name of a checkpoint; -1 for any other name."""
    number = os.fspath(path).rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Returns the newest complete checkpoint in a run's output folder, or `None`."""
    return next((str(path) for path in reversed(checkpoints(folder)) if is_complete(path)), None)


def rotate(folder: str | os.PathLike[str], limit: int | None, best: str | None) -> None:
    """Deletes the oldest complete checkpoints until `limit` are left, but neither the last nor the best one.

    transformers would take an incomplete one, left by a kill, for the last. A limit of `None` or 0 keeps all.
    """
    complete = [path for path in checkpoints(folder) if is_complete(path)]
    spare = [path for path in complete[:-1] if step_of(path) != step_of(best or "")]
    for path in spare[: max(0, len(complete) - limit)] if limit else ():
        shutil.rmtree(path, ignore_errors=True)


def what_model(name: str) -> str:
    """Returns an id of a model that does not depend on its path: the checksum of its weights, or its Hub id."""
    found = sorted(Path(name).glob("*")) if name else []
    files = [path for path in found if path.suffix in (".safetensors", ".bin") and path.name != _NO_WEIGHTS]
    if not files:
        return name
    with ThreadPoolExecutor(_READERS) as pool:
        together = xxhash.xxh3_128("".join(pool.map(_checksum, files)).encode())
    return f"a folder of weights, XXH3 {together.hexdigest()[:16]}"


def _checksum(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


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
