"""Small JSON files that are either whole or not there."""

from __future__ import annotations

import json
import os
from typing import Any


def write_state(path: str, state: dict[str, Any]) -> None:
    """Writes a JSON file so that a crash leaves the old content or the new one, never a part."""
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_state(path: str) -> dict[str, Any]:
    """Returns the content of a file that `write_state` made.

    Raises:
        ValueError: If the file is missing or damaged.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError as error:
        raise ValueError(
            f"resume_from_checkpoint: {path} is missing; the checkpoint was not written by EPOTrainer"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"resume_from_checkpoint: {path} is damaged ({error}); take an earlier checkpoint") from error
