"""The command `epo-trl`. A command is a module of its own name in this folder and a line in `COMMANDS`.

The module has `main(argv) -> exit code`, and is imported when its command is called. Heavy imports (torch, a game) wait
inside its functions, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from epo_trl import __version__
from epo_trl.cli.base import fail
from epo_trl.envs.base import EnvError

# What the help lists: groups of commands, and what each is for.
COMMANDS = {
    "Train and evaluate (without arguments: the configs that are there)": {
        "sft": "warm start: imitate a scripted expert",
        "train": "RL by GRPO or PPO, with EPO's terms",
        "evaluate": "play whole test lists with a checkpoint, and report",
    },
    "Games": {
        "play": "play an episode in the terminal, yourself or with an expert or a model",
        "games": "make games",
        "verify": "check an engine on games",
    },
    "Experiments": {
        "study": "run methods x seeds from one YAML file, and report",
        "plot": "draw reward, success and entropy curves of runs",
        "watch": "see the episodes of a run, token by token, in a page or the terminal",
    },
    "Models and machines": {
        "doctor": "what works here, what is missing, and how to mend it",
        "memory": "estimate the memory of each GPU, and with a config the time and GPU-hours of a run",
        "merge": "make a plain checkpoint of an adapter and its base",
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 if a check failed or the input is unusable (argparse exits with 2 on its own)."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = _parser().parse_args(words[:1]).command
    try:
        return int(import_module(f"{__name__}.{name}").main(words[1:]))
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
        description="Train LLM agents with reinforcement learning over many turns, and see what they do.\n\n"
        + "\n".join(lines).rstrip(),
        epilog="epo-trl COMMAND --help says what a command takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"epo-trl {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=names, help=argparse.SUPPRESS)
    return parser
