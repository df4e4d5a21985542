"""The studies and recipes that come with the package, for use without a clone of the repository."""

from __future__ import annotations

from pathlib import Path

# Contains the folders `studies` and `recipes`: links to the repository's root, or copies in a wheel.
PACKAGE = Path(__file__).parents[1]


def find(path: Path) -> Path:
    """Finds a file in the current folder, or else in the package; returns `path` itself if it is in neither.

    So `recipes/sft.py` in a study has the same meaning with and without a clone.
    """
    shipped = PACKAGE / path
    return shipped if not path.is_file() and path.parent.parts and shipped.is_file() else path


def find_study(name: str | Path) -> Path:
    """Finds the file of a study by its path, or a built-in study by its name, such as `smoke`."""
    path = find(Path(name))
    shipped = PACKAGE / "studies" / f"{name}.yaml"
    return shipped if not path.is_file() and shipped.is_file() else path


def shown(path: Path) -> str:
    """Formats a path for messages: that of a built-in file is relative to the package."""
    return (path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path).as_posix()


def names() -> list[str]:
    """Returns the names of the built-in studies."""
    return sorted(path.stem for path in (PACKAGE / "studies").glob("*.yaml"))
