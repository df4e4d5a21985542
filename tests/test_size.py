"""Lines of the parts of this project, as a ratchet: a part that grows raises its number here, with the reason in the
commit; a part that shrinks lowers it.
"""

from pathlib import Path

import pytest
from test_layers import PACKAGE, part_of

ROOT = PACKAGE.parent
LINES = {"core": 17_189, "games": 4_901, "lab": 3_153, "tests": 28_941, "docs": 4_183}


def part_of_the_project(path: Path) -> str:
    if PACKAGE not in path.parents:
        return path.relative_to(ROOT).parts[0]
    return part if (part := part_of(path)) in ("games", "lab") else "core"


def count(part: str) -> int:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").glob("*.md")]
    chosen = [path for path in files if part_of_the_project(path) == part]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in chosen)


@pytest.mark.parametrize("part", LINES)
def test_no_part_grows_unseen_and_none_shrinks_without_its_number(part):
    lines = count(part)
    assert LINES[part] - 100 <= lines <= LINES[part], f"{part}: {lines} lines"
