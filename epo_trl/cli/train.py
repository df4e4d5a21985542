"""`epo-trl train`: RL on any environment, as `recipes/train.py` does it."""

from __future__ import annotations

from collections.abc import Sequence

from epo_trl.cli.recipe import run


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    return run("train", argv)
