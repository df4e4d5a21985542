"""Checkpoints that are whole: a list of all files, sizes and checksums is written last, and nothing else is resumed."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from epo_trl.long_runs.state_file import read_state, write_state

MANIFEST = "manifest.json"
_NO_WEIGHTS = "training_args.bin"  # transformers writes it beside them
_CHUNK_BYTES = 2**23
_READERS = 8  # files that are read at a time; one alone does not fill a network disk


def seal(folder: str | os.PathLike[str]) -> None:
    """Writes the list of the checkpoint's files, their sizes and checksums, after all of them are on the disk."""
    files = _files(Path(folder))
    for path in files.values():
        _flush(path)
    sizes, sums = [path.stat().st_size for path in files.values()], _checksums(files.values())
    listed = dict(zip(files, zip(sizes, sums, strict=True), strict=True))
    write_state(os.path.join(folder, MANIFEST), {"files": listed})
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


def _checksums(paths: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(_checksum, paths))


def _checksum(path: Path) -> str:
    """Returns the XXH3 of a file: it finds what a disk or a copy has spoilt, not what somebody has forged."""
    checksum = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum.update(chunk)
    return checksum.hexdigest()


def what_model(name: str) -> str:
    """Returns what a model is, wherever its folder has been moved: a checksum of its weights, or a Hub id as it is."""
    there = sorted(Path(name).glob("*")) if name else []
    files = [path for path in there if path.suffix in (".safetensors", ".bin") and path.name != _NO_WEIGHTS]
    if not files:
        return name
    together = xxhash.xxh3_128("".join(_checksums(files)).encode())
    return f"a folder of weights, XXH3 {together.hexdigest()[:16]}"


def _listed(folder: Path) -> dict[str, tuple[int, str | None]]:
    """Returns size and checksum of each file as they were written; raises `ValueError` if the list is damaged."""
    path = folder / MANIFEST
    content = read_state(path)
    if "bytes" in content:  # by an earlier version
        return {name: (size, None) for name, size in content["bytes"].items()}
    files = read_state(path, "files")["files"]
    try:
        return {name: (int(size), str(checksum)) for name, (size, checksum) in files.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error


def size_of(folder: str | os.PathLike[str]) -> int:
    """Returns the bytes of a whole checkpoint."""
    return sum(size for size, _ in _listed(Path(folder)).values())


def damage(folder: str | os.PathLike[str], *, contents: bool = False) -> str | None:
    """Returns what is wrong with a checkpoint, or `None` if it is whole.

    Args:
        folder: The checkpoint.
        contents: Whether the files are read and their checksums compared, beside their sizes.
    """
    path = Path(folder)
    if not (path / MANIFEST).is_file():
        return f"{MANIFEST} is missing: it was cut off, or is not of this version"
    try:
        listed = _listed(path)
    except ValueError as error:
        return str(error)
    for name, (size, _) in listed.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} is damaged: it has {file.stat().st_size:,} bytes, {size:,} were written"
    summed = {name: checksum for name, (_, checksum) in listed.items() if contents and checksum is not None}
    found = _checksums(path / name for name in summed)
    spoilt = [name for name, checksum in zip(summed, found, strict=True) if summed[name] != checksum]
    return f"{spoilt[0]} is damaged: it does not hold what was written" if spoilt else None


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Returns the folders `checkpoint-<step>`, whole or not, the newest last."""
    found = [path for path in Path(folder).glob("checkpoint-*") if path.is_dir() and step_of(path) >= 0]
    return sorted(found, key=step_of)


def step_of(path: str | os.PathLike[str]) -> int:
    """Returns the optimizer steps before a checkpoint, from its name; -1 for another name."""
    number = os.fspath(path).rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Returns the newest whole checkpoint in a run's output folder, or `None`; warns of those that it passes over.

    Their contents are compared with the checksums.
    """
    for path in reversed(checkpoints(folder)):
        wrong = damage(path, contents=True)
        if wrong is None:
            return str(path)
        warnings.warn(f"{path} is passed over: {wrong}", stacklevel=2)
    return None


def rotate(folder: str | os.PathLike[str], limit: int | None, keep: set[str]) -> None:
    """Deletes checkpoints until `limit` are left, those that are not whole first, then the oldest.

    Args:
        folder: A run's output folder.
        limit: Number of checkpoints to keep; `None` or 0 keeps all.
        keep: Paths of those that stay in any case.
    """
    if not limit or limit < 0:
        return
    found = sorted(checkpoints(folder), key=lambda path: (damage(path) is None, step_of(path)))
    kept = {os.path.realpath(path) for path in keep}
    for path in [path for path in found if os.path.realpath(path) not in kept][: max(0, len(found) - limit)]:
        shutil.rmtree(path, ignore_errors=True)
