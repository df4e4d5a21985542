"""Checkpoints that are whole: a list of all files and their sizes is written last, and nothing else is resumed."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from pathlib import Path

from epo_trl.trainers.state_file import read_state, write_state

MANIFEST = "manifest.json"


def seal(folder: str | os.PathLike[str]) -> None:
    """Writes the list of the checkpoint's files and sizes, after all of them are on the disk."""
    files = _files(Path(folder))
    for path in files.values():
        _flush(path)
    write_state(os.path.join(folder, MANIFEST), {"bytes": {name: path.stat().st_size for name, path in files.items()}})
    _flush(Path(folder))


def _files(folder: Path) -> dict[str, Path]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path for path in paths}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(folder: str | os.PathLike[str]) -> str | None:
    """Returns what is wrong with a checkpoint, or `None` if it is whole. Sizes are compared, contents are not."""
    path = Path(folder)
    if not (path / MANIFEST).is_file():
        return f"{MANIFEST} is missing: it was cut off, or is not of this version"
    try:
        expected = read_state(str(path / MANIFEST))["bytes"]
    except ValueError as error:
        return str(error)
    for name, size in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} is damaged: it has {file.stat().st_size:,} bytes, {size:,} were written"
    return None


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Returns the folders `checkpoint-<step>`, whole or not, the newest last."""
    found = [path for path in Path(folder).glob("checkpoint-*") if path.is_dir() and _step(path) >= 0]
    return sorted(found, key=_step)


def _step(path: Path) -> int:
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Returns the newest whole checkpoint in a run's output folder, or `None`; warns of those that it passes over."""
    for path in reversed(checkpoints(folder)):
        wrong = damage(path)
        if wrong is None:
            return str(path)
        warnings.warn(f"{path} is passed over: {wrong}", stacklevel=2)
    return None


def rotate(folder: str | os.PathLike[str], limit: int | None, keep: set[str]) -> None:
    """Deletes checkpoints until `limit` are left, those that are not whole first, then the oldest.

    Args:
        folder: A run's output folder.
        limit: How many to leave; `None` or 0 for all.
        keep: Paths of those that stay in any case.
    """
    if not limit or limit < 0:
        return
    found = sorted(checkpoints(folder), key=lambda path: (damage(path) is None, _step(path)))
    kept = {os.path.realpath(path) for path in keep}
    for path in [path for path in found if os.path.realpath(path) not in kept][: max(0, len(found) - limit)]:
        shutil.rmtree(path, ignore_errors=True)


class DiskFullError(OSError):
    """There is no room for a checkpoint."""


def room_problem(folder: str | os.PathLike[str], weights: int) -> str | None:
    """Returns what is wrong if a new checkpoint will not fit on the disk, or `None`.

    Args:
        folder: The folder of the new checkpoint, which need not exist.
        weights: Bytes of the weights: what is needed at least. The last whole checkpoint beside it tells more.
    """
    run_dir = Path(folder).parent
    free, needed = _free_bytes(run_dir), _size_of_last(run_dir) or weights
    return None if free >= needed else _no_room(Path(folder), needed, free)


def explain_full_disk(error: Exception, folder: str | os.PathLike[str], weights: int) -> None:
    """Removes what was written and raises `DiskFullError` if a checkpoint failed for want of room; else does nothing.

    Args:
        error: What was raised while the checkpoint was written. The libraries that write it do not agree on a type.
        folder: The folder of the checkpoint.
        weights: As for `room_problem`.
    """
    run_dir = Path(folder).parent
    free, needed = _free_bytes(run_dir), _size_of_last(run_dir) or weights
    says_so = "no space left" in str(error).lower() or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if says_so or free < needed:
        shutil.rmtree(folder, ignore_errors=True)
        raise DiskFullError(_no_room(Path(folder), needed, free)) from error


def _free_bytes(run_dir: Path) -> int:
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if path.is_dir())
    return shutil.disk_usage(existing).free


def _whole(run_dir: Path) -> list[Path]:
    return [path for path in checkpoints(run_dir) if damage(path) is None]


def _size_of_last(run_dir: Path) -> int:
    whole = _whole(run_dir)
    return sum(read_state(str(whole[-1] / MANIFEST))["bytes"].values()) if whole else 0


def _no_room(folder: Path, needed: int, free: int) -> str:
    whole = _whole(folder.parent)
    kept = f"{whole[-1]} is whole" if whole else "there is none before it"
    return (
        f"output_dir: no room for the checkpoint {folder}: it needs {needed / 1e6:,.1f} MB at least, "
        f"{free / 1e6:,.1f} MB are free; {kept}. Free some room and start the same command again, or lower "
        "save_total_limit"
    )
