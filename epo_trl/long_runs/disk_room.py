"""A full disk: seen before something is written where that can be, explained where it cannot."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from epo_trl.long_runs.checkpoint_files import checkpoints, damage, size_of


class DiskFullError(OSError):
    """There is no room for a checkpoint or the final model."""


@dataclass(frozen=True)
class DiskRoom:
    """What a run is about to write into its output folder.

    Args:
        what: Its name in a message.
        folder: The new folder that it is written to, inside of the run's; it need not exist.
        needed: Bytes that it takes at least.
    """

    what: str
    folder: str
    needed: int

    @classmethod
    def for_checkpoint(cls, folder: str, weights: int) -> DiskRoom:
        """Returns what a checkpoint takes: as much as the last whole one beside it, the weights alone for the first."""
        whole = _whole(Path(folder).parent)
        return cls("the checkpoint", folder, size_of(whole[-1]) if whole else weights)

    def check(self) -> None:
        """Raises `DiskFullError` if it will not fit."""
        if self._free_bytes() < self.needed:
            raise DiskFullError(self._message())

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns an error for want of room into `DiskFullError`, after what was written has been removed.

        The libraries that write do not agree on a type of error.
        """
        try:
            yield
        except Exception as error:
            text, number = str(error).lower(), getattr(error, "errno", None)
            says_so = "no space left" in text or number in (errno.ENOSPC, errno.EDQUOT)
            if not says_so and self._free_bytes() >= self.needed:
                raise
            message = self._message()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise DiskFullError(message) from error

    def _free_bytes(self) -> int:
        run_dir = Path(self.folder).parent
        existing = next(path for path in (run_dir, *run_dir.absolute().parents) if path.is_dir())
        return shutil.disk_usage(existing).free

    def _message(self) -> str:
        whole = _whole(Path(self.folder).parent)
        kept = f"{whole[-1]} is whole" if whole else "there is no checkpoint before it"
        return (
            f"output_dir: no room for {self.what} {self.folder}: it needs {self.needed / 1e6:,.1f} MB at least, "
            f"{self._free_bytes() / 1e6:,.1f} MB are free; {kept}. Free some room and start the same command again, "
            "or lower save_total_limit"
        )


def _whole(run_dir: Path) -> list[Path]:
    return [path for path in checkpoints(run_dir) if damage(path) is None]
