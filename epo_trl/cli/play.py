"""`epo-trl play ENV`: play one episode in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from epo_trl.cli.base import say
from epo_trl.envs.registry import ENVIRONMENTS

USAGE = f"""usage: epo-trl play ENV [--player human|expert|CHECKPOINT] [--option value ...]

ENV is {", ".join(ENVIRONMENTS)}, or 'module:Class' for a custom environment. Examples:
  epo-trl play trap
  epo-trl play alfworld --games generated --player expert --split iid --index 3
  epo-trl play --config alfworld/eval_tiny_cpu --player runs/alfworld-tiny/grpo_epo-seed0 --show_prompt
All options: epo-trl play ENV --help"""


def main(argv: Sequence[str]) -> int:
    """Plays the episode and returns the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        say(USAGE)
        return 0
    named = [] if argv[0].startswith("-") else ["--environment", argv[0]]
    sys.argv = ["epo-trl play", *named, *argv[len(named) // 2 :]]
    import epo_trl.threads  # noqa: F401 - before torch

    from epo_trl.launch.program import run_program, shipped_command

    run_program(lambda: import_module("epo_trl.launch.play").main(), shipped_command("play"))
    return 0
