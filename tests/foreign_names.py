"""Names that other libraries do not promise to keep: the table of them in CONTRIBUTING.md, and what to do about one."""

import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = "## Names of other libraries"


@dataclass(frozen=True)
class Row:
    name: str
    library: str
    homes: tuple[str, ...]  # files, as paths below the root
    used: str


def read_table() -> dict[str, Row]:
    """Returns the rows by name."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split(HEADING)[1].split("\n## ")[0]
    rows = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            name, library, homes, used = (cell.strip() for cell in line.strip("| ").split(" | "))
            name = name.strip("`")
            assert name not in rows, f"CONTRIBUTING.md: {name} has two rows"
            rows[name] = Row(name, library, tuple(f"epo_trl/{home}" for home in re.findall(r"`([^`]+)`", homes)), used)
    return rows


TABLE = read_table()


def pinned(library: str) -> str:
    """Returns the version that the package was written against, or `"?"`."""
    found = re.search(rf"^{library}==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return found[1] if found else "?"


def installed(library: str) -> str:
    """Returns the version that is here; Python's for its own modules."""
    try:
        return version(library)
    except PackageNotFoundError:
        return f"Python {platform.python_version()}"


def advice(name: str, expected: object, got: object, used: str = "", library: str = "trl") -> str:
    """Returns what has moved, what it is used for and what to do. The table knows it for its names."""
    row = TABLE.get(name, Row(name, library, ("epo_trl/trainers",), used))
    return (
        f"\n{row.library}: {name} is not what epo_trl was written against "
        f"({row.library} {pinned(row.library)}, found {installed(row.library)})."
        f"\n  expected: {expected}\n  got:      {got}\n  used for: {used or row.used}, in {', '.join(row.homes)}"
        "\nWhat to do:"
        f"\n  1. Now: pin the last {row.library} that passes this test (setup.cfg, constraints.txt)."
        f"\n  2. Read {name} in the source of {row.library}, and what has changed there since."
        "\n  3. Adapt the place that uses it (override with super(), never paste a body), then this test and the table "
        "in CONTRIBUTING.md, then the pin."
    )
