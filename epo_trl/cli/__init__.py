"""The command `epo-trl`. Each command is a module of the same name in this folder and a line in `COMMANDS`.

The module defines `main(argv) -> exit code` and is imported when its command is called. Heavy imports (torch, a game)
are inside its functions, so `--help` responds at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from epo_trl import __version__
from epo_trl.cli.base import fail
from epo_trl.envs.base import EnvError

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
    words = list(sys.argv[1:] if argv is None else argv)
    name = _parser().parse_args(words[:1]).command
    try:
        return int(import_module(f"{__name__}.{name.replace('-', '_')}").main(words[1:]))
    except EnvError as error:
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
