"""Stores the episodes of a running evaluation in files, so an interrupted evaluation does not replay them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from epo_trl.errors import InputError, changed_settings
from epo_trl.runs.files import write_state
from epo_trl.types import Episode


class PartialResults:
    """The finished parts of an evaluation, one file each, in the folder `<output>.parts`.

    Each file is complete or absent, even if the process is killed. Several processes may share the folder if each part
    is written by only one of them. An output or a part that was made with other settings is an `InputError`.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]):
        self.output = output
        self.folder = self.output.with_name(f"{self.output.name}.parts")
        self.settings = json.loads(json.dumps(settings))
        self.finished = self._read(self.output)  # what `finish` has written, or `None`
        self._parts = {file.stem: self._read(file) for file in self.folder.glob("*.json")}

    def read(self, part: str) -> tuple[list[Episode], float] | None:
        """Returns the episodes of a part and their wall time in seconds, or `None` if it had not been played."""
        found = self._parts.get(part)
        return None if found is None else ([Episode.from_dict(data) for data in found["episodes"]], found["seconds"])

    def keep(self, part: str, episodes: list[Episode], seconds: float) -> None:
        """Writes the episodes of a part, without token ids, with the settings."""
        bare = [asdict(episode.without_tokens()) for episode in episodes]
        content = {"episodes": bare, "seconds": seconds, "settings": self.settings}
        write_state(self.folder / f"{part}.json", content)

    def finish(self, results: Mapping[str, Any]) -> None:
        """Writes the output with its settings, and removes the parts."""
        write_state(self.output, {**results, "settings": self.settings})
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, path: Path) -> dict[str, Any] | None:
        """Returns the content of a file of this evaluation, or `None` if it is missing."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            if path != self.output:
                return None  # a damaged part is played again
            found = {}
        settings = found.get("settings") if isinstance(found, dict) else None
        if settings == self.settings:
            return dict(found)
        differ = "; ".join(changed_settings(settings, self.settings)) if settings else "it has no settings"
        raise InputError(
            f"output: expected a file of this evaluation, got {self.output}, but {path} is of another evaluation "
            f"({differ}); use another file, or delete that one to start over"
        )
