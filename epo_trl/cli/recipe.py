"""Shared code of `epo-trl train`, `sft` and `evaluate`, which run the recipes with the configs of the package."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from epo_trl.cli.base import fail, say

MAINS = {"train": "training", "sft": "imitation", "evaluate": "evaluation"}  # modules of epo_trl.launch
# A link to the folder of that name in the repository.
ACCELERATE_CONFIGS = Path(__file__).parents[1] / "accelerate_configs"
# Options that are passed to `accelerate launch`: numbers of processes and machines, and the rank of this machine.
LAUNCH_OPTIONS = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")

TORCHRUN_SIGNALS = "PET_SIGNALS_TO_HANDLE"  # signals that torchrun forwards; it kills the processes after 30 seconds


def run(command: str, argv: Sequence[str]) -> int:
    """Runs a recipe and returns its exit code. Does not return if accelerate starts several processes."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--accelerate_config", "--accelerate-config")
    for name in LAUNCH_OPTIONS:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    asked, words = parser.parse_known_args(argv)
    from epo_trl.launch.command_line import CHECK, HELP
    from epo_trl.launch.program import run_program, shipped_command

    options = {name: value for name in LAUNCH_OPTIONS if (value := getattr(asked, name)) is not None}
    if asked.accelerate_config is not None or options:
        try:
            launch = launch_command(asked.accelerate_config, options)
            if words and words[0] != CHECK:
                shipped_command(command).read(words)  # one error message, not one per process
        except ValueError as error:
            return fail(error)
        # Only the training processes handle Ctrl-C: the launchers wait until they have saved a checkpoint.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.environ.setdefault(TORCHRUN_SIGNALS, "SIGTERM,SIGHUP,SIGQUIT")
        os.execv(sys.executable, [*launch, command, *words])
    sys.argv = [f"epo-trl {command}", *words]
    import epo_trl.threads  # noqa: F401 - before torch

    try:
        run_program(lambda: import_module(f"epo_trl.launch.{MAINS[command]}").main(), shipped_command(command))
    finally:
        if not HELP.isdisjoint(words) and os.environ.get("RANK", "0") == "0":
            say(launch_help())
    return 0


def launch_help() -> str:
    """Returns the help for the options of accelerate and for those that a config cannot set."""
    shipped = ", ".join(sorted(_shipped()))
    return (
        "several processes, started by accelerate launch:\n"
        f"  --accelerate_config FILE  a YAML file, or one of {shipped}\n"
        f"  {', '.join(f'--{name}' for name in LAUNCH_OPTIONS)}\n"
        "check configs without running them:\n"
        "  --check FILE [FILE ...]\n"
        "show the traceback of every error:\n"
        "  --traceback"
    )


def launch_command(config: str | None, options: Mapping[str, str]) -> list[str]:
    """Returns the command that starts `epo-trl` in several processes, without its own arguments.

    Args:
        config: A file for `accelerate launch --config_file`, or the name of a shipped one.
        options: Values of `LAUNCH_OPTIONS` that override the config.

    Raises:
        ValueError: If there is no such config.
    """
    words = [sys.executable, "-m", "accelerate.commands.launch"]
    if config is not None:
        shipped = _shipped()
        file = shipped.get(config, Path(config))
        if not file.is_file():
            names = ", ".join(sorted(shipped))
            raise ValueError(f"--accelerate_config: expected a YAML file or one of {names}, got {config!r}")
        words += ["--config_file", str(file)]
    words += [word for name, value in options.items() for word in (f"--{name}", value)]
    return [*words, "-m", "epo_trl.cli"]


def _shipped() -> dict[str, Path]:
    return {path.stem: path for path in ACCELERATE_CONFIGS.glob("*.yaml")}
