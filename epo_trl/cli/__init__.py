"""The command `epo-trl`. Each command is a line in `COMMANDS` and a module that the line names.

The module defines `main(argv) -> exit code`; heavy imports (torch, a game) are inside its functions, so `--help`
responds at once. The modules of recipes load torch, and their `main` parses a `CommandLine`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from epo_trl import __version__
from epo_trl.cli.base import TRACEBACK, run_program

if not sys.stderr.isatty():  # a log file gets a line of a bar every ten seconds
    os.environ.setdefault("TQDM_MININTERVAL", "10")

# Groups of commands, for the help. Of each: its module, whether it is a recipe, and its description.
COMMANDS = {
    "Train and evaluate (without arguments: list the configs)": {
        "sft": ("epo_trl.cli.imitation", True, "warm start: supervised fine-tuning on a scripted expert"),
        "train": ("epo_trl.cli.train", True, "RL with GRPO or PPO, with the terms of EPO"),
        "evaluate": ("epo_trl.cli.evaluation", True, "evaluate a checkpoint, the expert or chance on whole test lists"),
    },
    "Games": {
        "play": ("epo_trl.lab.play", True, "play an episode in the terminal, as a person, the expert or a model"),
        "games": ("epo_trl.lab.games", False, "generate games"),
        "serve": ("epo_trl.lab.serve.command", False, "serve games to OpenEnv clients and other trainers"),
    },
    "Experiments": {
        "study": ("epo_trl.lab.study.command", False, "run methods x seeds from one YAML file and write a report"),
        "plot": ("epo_trl.lab.plots", False, "draw reward, success and entropy curves of runs"),
        "audit-credit": (
            "epo_trl.lab.credit_audit.program",
            True,
            "compare the credit of each turn with its true advantage, by continuations from copied states",
        ),
        "watch": ("epo_trl.cli.watch", False, "show the episodes of a run, token by token, in a page"),
    },
    "Models and machines": {
        "doctor": ("epo_trl.lab.doctor", False, "check this machine: what works, and how to fix what does not"),
        "memory": ("epo_trl.lab.memory", False, "estimate the memory per GPU of a config's run"),
        "merge": ("epo_trl.cli.merge", False, "merge an adapter into its base model"),
    },
}
MODULES = {name: (module, recipe) for group in COMMANDS.values() for name, (module, recipe, _) in group.items()}
# Options that a first word without dashes stands for.
POSITIONAL = {"play": "--environment", "serve": "--environment", "audit-credit": "--audited_run"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, or 1 if a check failed or the input is invalid (argparse itself exits with 2)."""
    given = list(sys.argv[1:] if argv is None else argv)
    width = max(map(len, MODULES))
    lines = []
    for title, group in COMMANDS.items():
        lines += [f"{title}:", *(f"  {name:{width}}  {text}" for name, (_, _, text) in group.items()), ""]
    parser = argparse.ArgumentParser(
        prog="epo-trl",
        usage="epo-trl COMMAND [--help] ...",
        description="Train multi-turn LLM agents with reinforcement learning, and inspect their episodes.\n\n"
        + "\n".join(lines).rstrip(),
        epilog="epo-trl COMMAND --help lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"epo-trl {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=list(MODULES), help=argparse.SUPPRESS)
    if not given:
        parser.print_help()
        return 0
    name, options = parser.parse_args(given[:1]).command, given[1:]
    module, is_recipe = MODULES[name]
    if name in POSITIONAL and options and not options[0].startswith("-"):
        options = [POSITIONAL[name], *options]
    if is_recipe:
        from epo_trl.cli.program import run_command

        return run_command(name, options)
    words = [option for option in options if option != TRACEBACK]
    return run_program("epo-trl: error", lambda: import_module(module).main(words), options)
