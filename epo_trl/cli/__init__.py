"""The command `epo-trl`. Each command is a line in `COMMANDS` and a module of this folder.

The module has the command's name and defines `main(argv) -> exit code`; heavy imports (torch, a game) are inside its
functions, so `--help` responds at once. The modules of `MAINS` load torch and are recipes: their `main` parses a
`CommandLine`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from epo_trl import __version__
from epo_trl.cli.base import TRACEBACK, fail
from epo_trl.errors import EpoTrlError

# The commands that are recipes, and the modules of this folder with their `main`.
MAINS = {
    "train": "training", "sft": "imitation", "evaluate": "evaluation", "play": "play", "audit-credit": "audit_credit"
}  # fmt: skip
# Groups of commands with their descriptions, for the help.
COMMANDS = {
    "Train and evaluate (without arguments: list the configs)": {
        "sft": "warm start: supervised fine-tuning on a scripted expert",
        "train": "RL with GRPO or PPO, with the terms of EPO",
        "evaluate": "evaluate a checkpoint on whole test lists",
    },
    "Games": {
        "play": "play an episode in the terminal, as a person, the expert or a model",
        "games": "generate games",
        "verify": "compare game engines",
        "serve": "serve games to OpenEnv clients and other trainers",
    },
    "Experiments": {
        "study": "run methods x seeds from one YAML file and write a report",
        "plot": "draw reward, success and entropy curves of runs",
        "audit-credit": "compare the credit of each turn with its true advantage, by continuations from copied states",
        "watch": "show the episodes of a run, token by token, in a page or the terminal",
    },
    "Models and machines": {
        "doctor": "check this machine: what works, what is missing, and how to fix it",
        "memory": "estimate the memory per GPU of a model or a config",
        "merge": "merge an adapter into its base model",
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, or 1 if a check failed or the input is invalid (argparse itself exits with 2)."""
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; without a stdout, Python does not complain at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(given: Sequence[str]) -> int:
    name, options = _parser().parse_args(given[:1]).command, given[1:]
    try:
        if name in MAINS:
            from epo_trl.cli.program import run_command

            return run_command(name, options)
        return int(import_module(f"{__name__}.{name}").main([option for option in options if option != TRACEBACK]))
    except BrokenPipeError:
        raise
    except (EpoTrlError, OSError) as error:
        if TRACEBACK in options or getattr(error, "keeps_traceback", False):
            raise
        return fail(error)


def _parser() -> argparse.ArgumentParser:
    names = [name for group in COMMANDS.values() for name in group]
    width = max(map(len, names))
    lines = []
    for title, group in COMMANDS.items():
        lines += [f"{title}:", *(f"  {name:{width}}  {text}" for name, text in group.items()), ""]
    parser = argparse.ArgumentParser(
        prog="epo-trl",
        usage="epo-trl COMMAND [--help] ...",
        description="Train multi-turn LLM agents with reinforcement learning, and inspect their episodes.\n\n"
        + "\n".join(lines).rstrip(),
        epilog="epo-trl COMMAND --help lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"epo-trl {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=names, help=argparse.SUPPRESS)
    return parser
