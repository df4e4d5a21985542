"""`epo-trl evaluate`: whole test lists, as `recipes/evaluate.py` plays them."""

from __future__ import annotations

from collections.abc import Sequence

from epo_trl.cli.recipe import run


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    return run("evaluate", argv)
