"""Detects a full disk before writing where possible, and explains errors of writing."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epo_trl.errors import EpoTrlError, FileError
from epo_trl.runs.checkpoint_files import checkpoint_size, checkpoints, find_corruption

_WRITING = re.compile(
    "I/O error|os error|iostream error|failed writing|write failed"
)  # in errors of safetensors and torch


def full_size(parameter: Any) -> int:
    """Returns the number of elements of a parameter, also of one that ZeRO-3 has sharded."""
    return int(vars(parameter).get("ds_numel", parameter.numel()))


class DiskFullError(EpoTrlError, OSError):
    """The disk is too full for a checkpoint or the final model."""


@dataclass(frozen=True)
class DiskRoom:
    """The disk space that the next save of a run needs.

    Args:
        what: Name of the saved object, shown in messages.
        folder: Target folder inside the output folder; it need not exist.
        needed: Minimum size in bytes.
    """

    what: str
    folder: str
    needed: int

    @classmethod
    def for_checkpoint(cls, folder: str, weights: int) -> DiskRoom:
        """Estimates the size of a checkpoint: that of the last complete one, or of the weights for the first."""
        last = _last_complete(folder)
        return cls("the checkpoint", folder, checkpoint_size(last) if last else weights)

    def check(self) -> None:
        """Raises `DiskFullError` if there is too little free space."""
        if self._free_bytes() < self.needed:
            raise DiskFullError(self._message())

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Converts an error of writing, as of a full disk or quota, into one line, after it deletes a partial folder.

        The libraries that write raise different types of errors.

        Raises:
            DiskFullError: If the disk is full.
            FileError: If it cannot be written for another reason.
        """
        try:
            yield
        except Exception as error:
            text, number = str(error), getattr(error, "errno", None)
            disk_full = number == errno.ENOSPC or "no space left" in text.lower() or self._free_bytes() < self.needed
            if not (disk_full or isinstance(error, OSError) or _WRITING.search(text)):
                raise
            message = self._message() if disk_full else self._other(text)
            if find_corruption(self.folder) is not None:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise (DiskFullError if disk_full else FileError)(message) from error

    def _free_bytes(self) -> int:
        run_dir = Path(self.folder).parent
        existing = next(path for path in (run_dir, *run_dir.absolute().parents) if path.is_dir())
        return shutil.disk_usage(existing).free

    def _message(self) -> str:
        return (
            f"output_dir: expected at least {self.needed / 1e6:,.1f} MB of free space for {self.what} {self.folder}, "
            f"got {self._free_bytes() / 1e6:,.1f} MB; {self._rest()}. Free some space and rerun the same command, or "
            "lower save_total_limit"
        )

    def _other(self, reason: str) -> str:
        return (
            f"output_dir: {self.what} {self.folder} cannot be written ({reason}); {self._rest()}. Check the quota and "
            "the limit of file sizes, and rerun the same command"
        )

    def _rest(self) -> str:
        last = _last_complete(self.folder)
        return f"{last} is complete" if last else "there is no earlier checkpoint"


def _last_complete(folder: str) -> Path | None:
    """Returns the newest complete checkpoint beside a folder."""
    complete = (path for path in reversed(checkpoints(Path(folder).parent)) if find_corruption(path) is None)
    return next(complete, None)
