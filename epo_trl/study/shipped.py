"""The studies and recipes that come with the package, for a folder that is no clone of the repository."""

from __future__ import annotations

from pathlib import Path

# Has the folders `studies` and `recipes`: in the repository links to those of the root, in a wheel copies.
PACKAGE = Path(__file__).parents[1]


def find(path: Path) -> Path:
    """Returns the file of that path in the current folder, or else in the package; `path` itself if neither is there.

    So `recipes/sft.py` in a study means the same with and without a clone.
    """
    shipped = PACKAGE / path
    return shipped if not path.is_file() and path.parent.parts and shipped.is_file() else path


def find_study(name: str | Path) -> Path:
    """Returns the file of a study: one of that path, or the shipped one of that name, such as `smoke`."""
    path = find(Path(name))
    shipped = PACKAGE / "studies" / f"{name}.yaml"
    return shipped if not path.is_file() and shipped.is_file() else path


def shown(path: Path) -> str:
    """Returns what a study or a command calls a file: the path of a shipped one starts in the package."""
    return (path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path).as_posix()


def names() -> list[str]:
    """Returns the names of the shipped studies."""
    return sorted(path.stem for path in (PACKAGE / "studies").glob("*.yaml"))
