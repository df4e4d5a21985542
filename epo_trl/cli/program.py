"""Runs a recipe as a program: in several processes if asked, with errors as one line and a Ctrl-C that saves."""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from epo_trl.cli import MODULES
from epo_trl.cli.base import TRACEBACK, rank, say
from epo_trl.cli.command_line import (
    HELP,
    CommandLine,
    ConfigIsValid,
    FirstParser,
    Program,
    builtin_command,
    overview,
    read_command_line,
    recipe_file,
)
from epo_trl.envs.registry import ENVIRONMENTS, forgetting_folders
from epo_trl.errors import EpoTrlError, InputError, one_line

CHECK = "--check"
SECONDS_BEFORE_OTHER_RANKS = 60.0
# A link to the folder of that name in the repository.
ACCELERATE_CONFIGS = Path(__file__).parents[1] / "accelerate_configs"
# Options that are passed to `accelerate launch`: numbers of processes and machines, and the rank of this machine.
LAUNCH_OPTIONS = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
TORCHRUN_SIGNALS = "PET_SIGNALS_TO_HANDLE"  # signals that torchrun forwards; it kills the processes after 30 seconds
PLAY_USAGE = f"""usage: epo-trl play ENV [--player human|expert|CHECKPOINT] [--option value ...]

ENV is {", ".join(ENVIRONMENTS)}, or 'module:Class' for a custom environment. Examples:
  epo-trl play trap
  epo-trl play alfworld --games generated --player expert --split iid --index 3
  epo-trl play --config alfworld/eval_tiny_cpu --player runs/alfworld-tiny/grpo_epo-seed0 --show_prompt
All options: epo-trl play ENV --help"""
AUDIT_USAGE = """usage: epo-trl audit-credit RUN --config FILE [--option value ...]

RUN is the output folder of a run, or a checkpoint in it, and FILE the config that it was trained with. Example:
  epo-trl audit-credit runs/alfworld-tiny/grpo_epo --config alfworld/tiny_cpu --audit_minutes 30
The same command continues an interrupted audit. All options: epo-trl audit-credit RUN --config FILE --help"""
# Commands whose first argument is positional: the option that it stands for, and the command's usage.
POSITIONAL = {"play": ("--environment", PLAY_USAGE), "audit-credit": ("--audited_run", AUDIT_USAGE)}

EXIT_CODE = 128 + signal.SIGINT  # exit code that a shell reports after Ctrl-C
LESS_MEMORY = (
    "The GPU is full. Lower per_device_train_batch_size (train, sft) or parallel (evaluate), and see whether another "
    "process uses the GPU; epo-trl memory --config computes what a run needs. More: docs/troubleshooting.md"
)
STOPPING = "stopping: the run saves a checkpoint after this step; press Ctrl-C again to end it at once"
INTERRUPTED = "interrupted; the same command resumes from what was saved"
# Ctrl-C comes twice where the ranks are in torchrun's session: from the terminal and from torchrun.
SECONDS_TO_FORWARD = 1.0

Main = Callable[[CommandLine], object]


@dataclass
class CtrlC:
    """Handles Ctrl-C while a program runs: training treats the first as SIGTERM and saves a checkpoint, the second ends
    it at once. In a notebook or another program Ctrl-C raises KeyboardInterrupt as usual.
    """

    name: str
    _stopping_since: float | None = field(default=None, init=False)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles Ctrl-C inside the block. Does nothing outside the main thread.

        Raises:
            SystemExit: With code 130, if Ctrl-C ended the block.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._first)
        try:
            yield
        except KeyboardInterrupt:
            self._say(INTERRUPTED)
            raise SystemExit(EXIT_CODE) from None
        except SystemExit as end:
            if self._stopping_since is not None and end.code == 128 + signal.SIGTERM:
                raise SystemExit(EXIT_CODE) from None
            raise
        finally:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)

    def _first(self, *_: Any) -> None:
        if not callable(signal.getsignal(signal.SIGTERM)):  # nothing is running that could save a checkpoint
            raise KeyboardInterrupt
        self._stopping_since = time.monotonic()
        signal.signal(signal.SIGINT, self._second)
        self._say(STOPPING)
        signal.raise_signal(signal.SIGTERM)

    def _second(self, *_: Any) -> None:
        since = time.monotonic() - (self._stopping_since or 0.0)
        if "TORCHELASTIC_RUN_ID" in os.environ and since < SECONDS_TO_FORWARD:
            return
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)

    def _say(self, text: str) -> None:
        """Writes to stderr from the first rank, without Python's buffers, which may be in use when the signal comes."""
        if rank() == 0:
            os.write(2, f"\n{self.name}: {text}\n".encode())


def run_recipe(
    main: Main, configs: Sequence[str], environment: str | None = None, algorithm: str | None = None
) -> None:
    """Runs the `main` of a recipe file with the command line of this process, see `run_program`.

    Args:
        main: Function that parses the options and runs the recipe.
        configs: Glob patterns of the recipe's YAML files, relative to its own folder.
        environment: See `Program`.
        algorithm: See `Program`.
    """
    run_program(main, recipe_file(Path(sys.argv[0]), configs, environment, algorithm), sys.argv[1:])


def run_command(name: str, argv: Sequence[str]) -> int:
    """Runs a command that is a recipe, in several processes if accelerate's options are given; returns its exit code.

    Raises:
        EpoTrlError: If several processes are wanted, and the command line or a config is invalid.
    """
    if name in POSITIONAL:
        option, usage = POSITIONAL[name]
        if not argv or argv[0] in ("-h", "--help"):
            say(usage)
            return 0
        if not argv[0].startswith("-"):
            argv = [option, *argv]
    parser = FirstParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--accelerate_config", "--accelerate-config")
    for option in LAUNCH_OPTIONS:
        parser.add_argument(f"--{option}", f"--{option.replace('_', '-')}")
    asked, rest = parser.parse_known_args(argv)
    options = {option: value for option in LAUNCH_OPTIONS if (value := getattr(asked, option)) is not None}
    if asked.accelerate_config is not None or options:
        return _launch(launch_words(asked.accelerate_config, options), name, rest)
    import epo_trl.threads  # noqa: F401 - before torch

    try:
        run_program(lambda line: import_module(MODULES[name][0]).main(line), builtin_command(name), rest)
    finally:
        if not HELP.isdisjoint(rest) and rank() == 0:
            say(launch_help())
    return 0


def _launch(launch: Sequence[str], name: str, argv: Sequence[str]) -> int:
    """Runs `accelerate launch` and returns the exit code of the first process that failed, which printed its error.

    With one process it does not return, see `_become_only_process`.
    """
    if argv and argv[0] != CHECK:
        read_command_line(argv)  # one error message, not one per process
    signal.signal(signal.SIGINT, _pass_on)
    os.environ.setdefault(TORCHRUN_SIGNALS, "SIGTERM,SIGHUP,SIGQUIT")
    from accelerate.commands import launch as accelerate_launch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    accelerate_launch.simple_launcher = _become_only_process
    try:
        accelerate_launch.launch_command(accelerate_launch.launch_command_parser().parse_args([*launch, name, *argv]))
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


def _become_only_process(args: argparse.Namespace) -> NoReturn:
    """Replaces this process by the only process of a run: signals reach the run, and its exit code is the command's.

    Raises:
        InputError: If several are wanted, which accelerate starts with MPI or for several GPUs, and else ignores.
    """
    for option in ("num_processes", "num_machines"):
        if args.mpirun_hostfile is None and (getattr(args, option) or 1) > 1:
            raise InputError(
                f"--{option}: expected 1, got {getattr(args, option)}: accelerate starts one process, since its config "
                "says so or there is no second GPU; use --accelerate_config multi_gpu or zero3 for several"
            )
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    command, environment = prepare_simple_launcher_cmd_env(args)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)


def launch_help() -> str:
    """Returns the help for the options of accelerate and for those that a config cannot set."""
    return (
        "several processes, started by accelerate launch:\n"
        f"  --accelerate_config FILE  a YAML file, or one of {', '.join(sorted(_accelerate_configs()))}\n"
        f"  {', '.join(f'--{name}' for name in LAUNCH_OPTIONS)}\n"
        "check configs without running them:\n"
        "  --check FILE [FILE ...]\n"
        "show the traceback of every error:\n"
        "  --traceback"
    )


def launch_words(config: str | None, options: Mapping[str, str]) -> list[str]:
    """Returns the words after `accelerate launch` that start `epo-trl`, without its own arguments.

    Raises:
        InputError: If there is no such config.
    """
    words = ["--quiet"]  # no traceback of accelerate's own after the error of a process
    if config is not None:
        known = _accelerate_configs()
        file = known.get(config, Path(config))
        if not file.is_file():
            names = ", ".join(sorted(known))
            raise InputError(f"--accelerate_config: expected a YAML file or one of {names}, got {config!r}")
        words += ["--config_file", str(file)]
    words += [word for name, value in options.items() for word in (f"--{name}", value)]
    return [*words, "-m", "epo_trl.cli"]


def _accelerate_configs() -> dict[str, Path]:
    return {path.stem: path for path in ACCELERATE_CONFIGS.glob("*.yaml")}


def run_program(main: Main, program: Program, argv: Sequence[str]) -> None:
    """Runs the `main` of a recipe. An `EpoTrlError` prints one line and exits with 1; Ctrl-C exits with 130. Other
    errors keep their traceback; `--traceback` shows it for all.

    Without arguments it only lists the configs of the recipe and the command for this machine, and exits with 0: after
    a failure, `accelerate launch` would add its own traceback. `--check FILE ...` only checks these configs, and
    `--check` after other options only checks these.
    """
    hide_warnings()
    options = [word for word in argv if word != TRACEBACK]
    with CtrlC(program.name).handled():
        if not options:
            if rank() == 0:
                import torch

                sys.stdout.write(overview(program, torch.accelerator.device_count()))
        elif options[0] == CHECK and options[1:]:
            raise SystemExit(check_configs(main, options[1:], program))
        else:
            message = _run(main, options, program, with_traceback=TRACEBACK in argv)
            if message:
                has_settings = any(word.startswith(("--config", "--environment")) for word in options)
                advice = "" if has_settings or not program.configs else overview(program, 0)
                _print_error(f"{program.name}: error: {message}\n{advice}")
                raise SystemExit(1)


def check_configs(main: Main, configs: Sequence[str], program: Program) -> int:
    """Checks configs and prints the error of each; returns 1 if one is invalid, else 0."""
    messages = {}
    for config in configs:
        with forgetting_folders():
            messages[config] = _run(main, ["--config", config, CHECK], program)
    for config, message in messages.items():
        if message:
            _print_error(f"{one_line(config)}: {message}\n")
    return int(any(messages.values()))


def _run(main: Main, argv: Sequence[str], program: Program, with_traceback: bool = False) -> str:
    """Runs `main`; returns the message of its error as one line, or `""`. Other errors are raised."""
    options = [word for word in argv if word != CHECK]
    try:
        line = read_command_line(options, program.environment, program.algorithm, check_only=CHECK in argv)
        main(replace(line, program=program.name))
    except ConfigIsValid:
        pass
    except Exception as error:
        message = str(error) if isinstance(error, EpoTrlError) else explain(error)
        if not message and isinstance(error, RuntimeError) and "out of memory" in str(error):
            error.add_note(LESS_MEMORY)
        if with_traceback or not message:
            raise
        return one_line(message)
    return ""


def explain(error: Exception) -> str:
    """Explains a known error of a library and its fix; returns `""` for other errors."""
    first_line = str(error).strip().split("\n")[0]
    if isinstance(error, pickle.UnpicklingError):
        return (
            "model_name_or_path, resume_from_checkpoint: expected tensors, got a pickle of other objects, which could "
            "run code when it is loaded; use safetensors. If you trust the source of the model, convert it: load its "
            f"weights with torch.load(FILE, weights_only=False), save them with save_pretrained ({first_line})"
        )
    if isinstance(error, ValueError) and "trust_remote_code" in str(error):
        return (
            f"trust_remote_code: expected true for a model with code of its own, got false: {first_line} Read the "
            "code, and set trust_remote_code to true if you trust it, or use a model that transformers supports"
        )
    if type(error).__name__ == "NoMatchingPeftModuleError":  # of PEFT, which only a run with an adapter imports
        return f"lora_target_modules: expected names of layers of the model, or all-linear; {first_line}"
    return ""


def hide_warnings() -> None:
    """Hides warnings of other libraries that appear in every run and that users cannot act on, one filter for each.

    TRL 1.16 calls methods that newer versions of transformers have renamed. DeepSpeed, where it is installed, warns of
    a machine without a GPU as soon as accelerate imports it, also in a run without DeepSpeed.
    """
    old = r"`(is_)?gradient_checkpointing\w*` is deprecated"
    warnings.filterwarnings("ignore", old, FutureWarning, r"transformers\.modeling_utils")
    logging.getLogger("DeepSpeed").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Setting accelerator to CPU")


def _print_error(text: str) -> None:
    """Writes to stderr from the first rank.

    Usually all ranks have the same error, and the launcher ends the others after the first. A rank that still runs
    a minute later has an error that the first does not have, and prints it.
    """
    if rank():
        time.sleep(SECONDS_BEFORE_OTHER_RANKS)
    sys.stderr.write(text)
    sys.stderr.flush()
