"""Runs a recipe as a program: lists its configs, checks them, starts several processes; a Ctrl-C saves."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from epo_trl.cli import MODULES
from epo_trl.cli.base import TRACEBACK, rank, run_program, say
from epo_trl.cli.options import NOTHING, RECIPES, CommandLine, ConfigIsValid, list_configs, read_command_line
from epo_trl.errors import InputError

# A link to the folder of that name in the repository.
ACCELERATE_CONFIGS = Path(__file__).parents[1] / "accelerate_configs"
# Options that are passed to `accelerate launch`: numbers of processes and machines, and the rank of this machine.
LAUNCH_OPTIONS = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
TORCHRUN_SIGNALS = "PET_SIGNALS_TO_HANDLE"  # signals that torchrun forwards; it kills the processes after 30 seconds
EXIT_CODE = 128 + signal.SIGINT  # exit code that a shell reports after Ctrl-C
STOPPING = "stopping: the run saves a checkpoint after this step; press Ctrl-C again to end it at once"
INTERRUPTED = "interrupted; the same command resumes from what was saved"


def run_command(name: str, argv: Sequence[str]) -> int:
    """Runs a command that is a recipe, with accelerate's options in several processes; returns its exit code."""
    first = argparse.ArgumentParser(f"epo-trl {name}", add_help=False, allow_abbrev=False)
    for option in ("accelerate_config", *LAUNCH_OPTIONS):
        first.add_argument(f"--{option}", f"--{option.replace('_', '-')}")
    asked, rest = first.parse_known_args(argv)
    launch = {option: value for option, value in vars(asked).items() if value is not None}
    if launch:
        return run_program("epo-trl: error", partial(_launch, launch, name, rest), argv)
    return run_recipe(name, f"epo-trl {name}", rest)


def run_recipe_file(command: str, **fixed: str) -> NoReturn:
    """Runs a file of `recipes/`, which is a command, with the command line of this process."""
    sys.exit(run_recipe(command, Path(sys.argv[0]).name, sys.argv[1:], fixed=fixed))


def run_recipe(
    command: str,
    program: str,
    argv: Sequence[str],
    main: Callable[[CommandLine], object] | None = None,
    fixed: Mapping[str, str] = NOTHING,
) -> int:
    """Runs a recipe and returns its exit code. Without arguments it only lists the command's configs, or its options.

    `--check FILE ...` only checks these configs, and `--check` after other options only checks these. The recipe's
    `main` is by default that of the command; messages begin with `program`; for `fixed` see `read_command_line`.
    """
    if not argv and list_configs(command):
        say(overview(program, command, fixed))
        return 0
    first = argparse.ArgumentParser(program, add_help=False, allow_abbrev=False)
    first.add_argument("--check", nargs="*")
    first.add_argument(TRACEBACK, action="store_true")
    given, options = first.parse_known_args(argv or ["--help"])

    def run(*config: str) -> None:
        check = given.check is not None
        line = read_command_line([*config, *options], check_only=check, program=program, fixed=fixed)
        with suppress(ConfigIsValid):
            (main or import_module(MODULES[command][0]).main)(line)  # loads torch

    if given.check:
        return max([run_program(file, partial(run, "--config", file), argv) for file in given.check])
    hide_warnings()
    with saving_at_ctrl_c(program):
        return run_program(f"{program}: error", run, argv)


def overview(program: str, command: str, fixed: Mapping[str, str]) -> str:
    """Formats the list of a recipe's configs, each with the first sentence of its file."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in list_configs(command).items()}
    lines = [f"\n{name}: {value}\n" for name, value in fixed.items()]
    own = {name: re.match(r"# (.+?\.)\s", text) for name, text in texts.items() if all(line in text for line in lines)}
    width = max(map(len, own))
    return "\n".join([
        f"{program} needs a config: a file, or one of these in {RECIPES}, which begin with their commands:",
        *(f"  {name:{width}}  {sentence[1] if sentence else ''}" for name, sentence in own.items()),
        f"Usage: {program} --config NAME_OR_FILE [--option value ...]; --help lists the options",
    ])  # fmt: skip


@contextmanager
def saving_at_ctrl_c(program: str) -> Iterator[None]:
    """Treats the first Ctrl-C in the block as SIGTERM, so that training saves a checkpoint; the second ends it at once.

    The exit code is then 130. In a notebook or another program Ctrl-C raises KeyboardInterrupt as usual.
    """
    pressed = False

    def tell(text: str) -> None:
        if rank() == 0:  # without Python's buffers, which may be in use when the signal comes
            os.write(2, f"\n{program}: {text}\n".encode())

    def press(*_: Any) -> None:
        nonlocal pressed
        if not callable(signal.getsignal(signal.SIGTERM)):  # nothing is running that could save a checkpoint
            raise KeyboardInterrupt
        pressed = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        tell(STOPPING)
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield
    except KeyboardInterrupt:
        tell(INTERRUPTED)
        raise SystemExit(EXIT_CODE) from None
    except SystemExit:
        if pressed:
            raise SystemExit(EXIT_CODE) from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def hide_warnings() -> None:
    """Hides warnings of other libraries that appear in every run and that users cannot act on, one filter for each.

    TRL 1.16 calls methods that newer versions of transformers have renamed. DeepSpeed, where it is installed, warns of
    a machine without a GPU as soon as accelerate imports it, also in a run without DeepSpeed. transformers misses the
    LM head in every checkpoint of a model that ties it to the embedding.
    """
    old = r"`(is_)?gradient_checkpointing\w*` is deprecated"
    warnings.filterwarnings("ignore", old, FutureWarning, r"transformers\.modeling_utils")
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    tied = "missing keys in the checkpoint model loaded: ['lm_head.weight']"
    logging.getLogger("transformers.trainer").addFilter(lambda record: tied not in record.getMessage())


# --------------------------------------------------------------------------------------------------- several processes


def _launch(options: dict[str, str], name: str, argv: Sequence[str]) -> int:
    """Runs `accelerate launch` and returns the exit code of the first process that failed, which printed its error.

    With one process it does not return, see `_become_only_process`.
    """
    read_command_line(argv)  # one error message, not one per process
    if config := options.pop("accelerate_config", ""):
        shipped = ACCELERATE_CONFIGS / f"{config}.yaml"
        options["config_file"] = str(shipped) if shipped.is_file() else config
    words = ["--quiet"]  # no traceback of accelerate's own after the error of a process
    words += [word for option, value in options.items() for word in (f"--{option}", value)]
    signal.signal(signal.SIGINT, _pass_on)
    os.environ.setdefault(TORCHRUN_SIGNALS, "SIGTERM,SIGHUP,SIGQUIT")
    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    launch.simple_launcher = _become_only_process
    try:
        launch.launch_command(launch.launch_command_parser().parse_args([*words, "-m", "epo_trl.cli", name, *argv]))
    except ChildFailedError as error:
        return max(error.get_first_failure()[1].exitcode, 1)  # below 0: ended by a signal
    return 0


def _pass_on(number: int, _: Any) -> None:
    """Passes Ctrl-C on to the training processes, and the launcher waits until they have saved a checkpoint.

    torchrun starts each in its own session, which the terminal does not reach.
    """
    import psutil

    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _become_only_process(args: Any) -> NoReturn:
    """Replaces this process by the only process of a run: signals reach the run, and its exit code is the command's.

    Several are an error: accelerate starts them with MPI or for several GPUs, and else ignores the number.
    """
    wanted = max(args.num_processes or 1, args.num_machines or 1)
    if wanted > 1 and args.mpirun_hostfile is None:
        raise InputError(
            f"--num_processes, --num_machines: expected 1, got {wanted}: accelerate starts one process, since its "
            "config says so or there is no second GPU; use --accelerate_config multi_gpu or zero3 for several"
        )
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    command, environment = prepare_simple_launcher_cmd_env(args)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)
