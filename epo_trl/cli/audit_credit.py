"""`epo-trl audit-credit RUN`: compare the credit of each turn with its true advantage."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from epo_trl.cli.base import say

USAGE = """usage: epo-trl audit-credit RUN --config FILE [--option value ...]

RUN is the output folder of a run, or a checkpoint in it, and FILE the config that it was trained with. Example:
  epo-trl audit-credit runs/alfworld-tiny/grpo_epo --config alfworld/tiny_cpu --audit_minutes 30
The same command continues an interrupted audit. All options: epo-trl audit-credit RUN --help"""


def main(argv: Sequence[str]) -> int:
    """Audits and returns the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        say(USAGE)
        return 0
    named = [] if argv[0].startswith("-") else ["--audited_run", argv[0]]
    sys.argv = ["epo-trl audit-credit", *argv[len(named) // 2 :], *named]
    import epo_trl.threads  # noqa: F401 - before torch

    from epo_trl.launch.builtin_configs import list_configs, with_config_path
    from epo_trl.launch.program import Program, run_program

    command = "epo-trl audit-credit RUN"
    program = Program("epo-trl audit-credit", list_configs("train"), command, command, with_config_path)
    run_program(lambda: import_module("epo_trl.credit_audit.program").main(), program)
    return 0
