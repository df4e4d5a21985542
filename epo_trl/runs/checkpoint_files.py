"""Complete checkpoints: a manifest of all files, sizes and checksums is written last and required to resume."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import xxhash

from epo_trl.errors import InputError
from epo_trl.runs.state_file import read_state, write_state

MANIFEST = "manifest.json"
FINISHED = "_finished.json"  # in the output folder of a run, written last
_NO_WEIGHTS = "training_args.bin"  # transformers writes it beside the weights
_CHUNK_BYTES = 2**23
_READERS = 8  # files read in parallel; a single reader does not saturate a network disk


def write_manifest(folder: str | os.PathLike[str]) -> None:
    """Flushes the files of a checkpoint to disk, then writes their sizes and checksums to the manifest."""
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
    """Returns the XXH3 of a file, which detects corruption by a disk or a copy, but not tampering."""
    checksum = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum.update(chunk)
    return checksum.hexdigest()


def what_model(name: str) -> str:
    """Returns an id of a model that does not depend on its path: the checksum of its weights, or its Hub id."""
    found = sorted(Path(name).glob("*")) if name else []
    files = [path for path in found if path.suffix in (".safetensors", ".bin") and path.name != _NO_WEIGHTS]
    if not files:
        return name
    together = xxhash.xxh3_128("".join(_checksums(files)).encode())
    return f"a folder of weights, XXH3 {together.hexdigest()[:16]}"


def _listed(folder: Path) -> dict[str, tuple[int, str]]:
    """Reads the size and checksum of each file from the manifest; raises `ValueError` if it is damaged."""
    path = folder / MANIFEST
    files = read_state(path, "files")["files"]
    try:
        return {name: (int(size), str(checksum)) for name, (size, checksum) in files.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{path} is damaged ({error})") from error


def checkpoint_size(folder: str | os.PathLike[str]) -> int:
    """Returns the size of a complete checkpoint in bytes."""
    return sum(size for size, _ in _listed(Path(folder)).values())


def find_corruption(folder: str | os.PathLike[str], *, contents: bool = False) -> str | None:
    """Describes the first fault of a checkpoint, or returns `None`. Compares sizes, with `contents` checksums too."""
    path = Path(folder)
    if not (path / MANIFEST).is_file():
        return f"{MANIFEST} is missing: the checkpoint is incomplete"
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
    checksums = _checksums(path / name for name in listed) if contents else []
    for name, checksum in zip(listed, checksums, strict=False):
        if listed[name][1] != checksum:
            return f"{name} is damaged: its checksum differs"
    return None


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Returns the folders `checkpoint-<step>`, complete or not, the newest last."""
    found = [path for path in Path(folder).glob("checkpoint-*") if path.is_dir() and step_of(path) >= 0]
    return sorted(found, key=step_of)


def step_of(path: str | os.PathLike[str]) -> int:
    """Parses the optimizer step from the name of a checkpoint; -1 for any other name."""
    number = os.fspath(path).rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Returns the newest complete checkpoint in a run's output folder, or `None`; warns about those it skips.

    It verifies the checksums of the contents.
    """
    for path in reversed(checkpoints(folder)):
        wrong = find_corruption(path, contents=True)
        if wrong is None:
            return str(path)
        warnings.warn(f"{path} is skipped: {wrong}", stacklevel=2)
    return None


def rotate(folder: str | os.PathLike[str], limit: int | None, keep: set[str | None]) -> None:
    """Deletes checkpoints until `limit` are left: incomplete ones first, then the oldest, but none of `keep`.

    A limit of `None` or 0 keeps all.
    """
    if not limit or limit < 0:
        return
    found = sorted(checkpoints(folder), key=lambda path: (find_corruption(path) is None, step_of(path)))
    excluded = {os.path.realpath(path) for path in keep if path}
    for path in [path for path in found if os.path.realpath(path) not in excluded][: max(0, len(found) - limit)]:
        shutil.rmtree(path, ignore_errors=True)


def abandoned(folder: Path, suffix: str = "") -> Path:
    """Returns the first path `_abandoned-<number><suffix>` in a folder that does not exist."""
    paths = (folder / f"_abandoned-{number}{suffix}" for number in count(1))
    return next(path for path in paths if not path.exists())


def set_aside(folder: str | os.PathLike[str], step: int = -1, resumed: str | None = None) -> None:
    """Renames checkpoints of later steps to `_abandoned-<number>-checkpoint-<step>`, which no run uses or deletes.

    Incomplete ones stay: no run resumes from them, and they may be overwritten.

    Args:
        folder: Output folder of the run.
        step: Step of the checkpoint that the run resumes from; -1 for a run that starts.
        resumed: Path of that checkpoint.
    """
    why = "of an earlier run" if resumed is None else f"later than {resumed}, from which the run resumes"
    for path in checkpoints(folder):
        if step_of(path) > step and (path / MANIFEST).is_file():
            free = abandoned(path.parent, f"-{path.name}")
            path.rename(free)
            warnings.warn(f"{path} is {why}: renamed to {free.name}", stacklevel=2)


def move_aside(folder: str | os.PathLike[str], step: int) -> None:
    """Moves the files `*step_<number>.*` of later steps to a new folder `_abandoned-<number>` beside them."""
    files = [file for file in Path(folder).glob("*step_*.*") if step_of(file.stem.replace("_", "-")) > step]
    if files:
        aside = abandoned(Path(folder))
        aside.mkdir()
        for file in files:
            file.rename(aside / file.name)


@contextmanager
def linked(folder: str | os.PathLike[str], names: Iterable[str]) -> Iterator[str]:
    """Yields a temporary folder with links to some files of a folder, by their relative paths."""
    with TemporaryDirectory() as temporary:
        for name in names:
            link = Path(temporary, name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(Path(folder, name).resolve())
        yield temporary


def put_in_place(source: Path, folder: Path) -> list[str]:
    """Moves all files of a folder to another and removes the empty folder. Returns their relative paths."""
    files = sorted(_files(source))
    for name in sorted(path.name for path in source.iterdir()):
        if (folder / name).is_dir():  # the critic's, or a checkpoint of DeepSpeed if the weights were not gathered
            shutil.rmtree(folder / name)
        os.replace(source / name, folder / name)
    source.rmdir()
    return files
