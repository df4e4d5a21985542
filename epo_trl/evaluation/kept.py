"""Episodes of an evaluation that is under way, in files: after an interruption they are not played again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from epo_trl.types import Episode

SETTINGS = "settings.json"
LATER = ("contents", "template")  # which earlier versions did not write


class OtherEvaluationError(ValueError):
    """The file for the reports belongs to an evaluation with another model or other settings."""


class KeptEpisodes:
    """The parts of an evaluation that have been played, one file each, in the folder `<output>.parts`.

    Each file is whole or absent, whenever the process is killed. Several processes may share the folder as long as each
    part is kept by one of them.

    Args:
        output: Where the reports will be.
        settings: Settings that decide the result, as JSON values. Episodes with other settings are never mixed in.

    Raises:
        OtherEvaluationError: If the output, or what is kept for it, was made with other settings.
    """

    def __init__(self, output: str | os.PathLike[str], settings: Mapping[str, Any]):
        self.output = Path(output)
        self.folder = self.output.with_name(f"{self.output.name}.parts")
        self.settings = json.loads(json.dumps(settings))
        for path in (self.folder / SETTINGS, self.output):
            found = _read(path)
            if found is not None:
                self._need_same(path, found.get("settings"))

    def finished(self) -> dict[str, Any] | None:
        """Returns what `finish` wrote, or `None` if the evaluation has not ended."""
        return _read(self.output)

    def start(self) -> None:
        """Makes the folder. For one process; the others wait for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / SETTINGS, {"settings": self.settings})

    def read(self, part: str) -> tuple[list[Episode], float] | None:
        """Returns the episodes of a part and the seconds they took, or `None` if it has to be played."""
        found = _read(self.folder / f"{part}.json")
        return ([Episode.from_dict(data) for data in found["episodes"]], found["seconds"]) if found else None

    def keep(self, part: str, episodes: list[Episode], seconds: float) -> None:
        """Writes the episodes of a part, without their tokens."""
        bare = [asdict(episode.without_tokens()) for episode in episodes]
        _write(self.folder / f"{part}.json", {"episodes": bare, "seconds": seconds})

    def finish(self, results: Mapping[str, Any]) -> None:
        """Writes the output, with the settings in it, and removes the parts."""
        _write(self.output, {**results, "settings": self.settings})
        shutil.rmtree(self.folder, ignore_errors=True)

    def _need_same(self, path: Path, found: Any) -> None:
        if isinstance(found, dict):
            found = {key: self.settings[key] for key in LATER if key in self.settings} | found
        if found == self.settings:
            return
        differ = "it does not say of what"
        if isinstance(found, dict):
            keys = sorted(
                key for key in found.keys() | self.settings.keys() if found.get(key) != self.settings.get(key)
            )
            differ = "; ".join(
                f"{key} {_short(found.get(key))} there, {_short(self.settings.get(key))} now" for key in keys
            )
        raise OtherEvaluationError(
            f"output: got {self.output}, but {path} is of another evaluation ({differ}); use another file, or delete "
            "that one to start anew"
        )


def _read(path: Path) -> dict[str, Any] | None:
    """Returns the content, `None` if there is no such file, and nothing if it is no JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    except OSError as error:
        raise OSError(f"output: {path} cannot be read ({error.strerror}); use another file") from error
    return found if isinstance(found, dict) else {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    with open(unfinished, "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
