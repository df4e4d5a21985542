"""Lines of the parts of this project, as a ratchet: a part that grows raises its number here, with the reason in the
commit; a part that shrinks lowers it.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINES = {"epo_trl/**/*.py": 34592, "tests/**/*.py": 39973, "docs/*.md": 5253}


def count(pattern: str) -> int:
    files = [path for path in ROOT.glob(pattern) if "recipes" not in path.parts]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


@pytest.mark.parametrize("pattern", LINES)
def test_no_part_grows_unseen_and_none_shrinks_without_its_number(pattern):
    lines = count(pattern)
    assert LINES[pattern] - 100 <= lines <= LINES[pattern], f"{pattern}: {lines} lines"
