"""`epo-trl train`: RL on any environment, like `recipes/train.py`."""

from __future__ import annotations

from collections.abc import Sequence

from epo_trl.cli.recipe import run


def main(argv: Sequence[str]) -> int:
    """Runs the recipe and returns the exit code."""
    return run("train", argv)
