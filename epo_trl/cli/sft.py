"""`epo-trl sft`: a warm start, as `recipes/sft.py` does it."""

from __future__ import annotations

from collections.abc import Sequence

from epo_trl.cli.recipe import run


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    return run("sft", argv)
