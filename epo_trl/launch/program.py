"""Runs a recipe as a program: lists its configs when called without arguments, and prints errors as one line."""

from __future__ import annotations

import dis
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb

from epo_trl.errors import EpoTrlError
from epo_trl.evaluation.samples import spelled
from epo_trl.launch.builtin_configs import FOLDER, list_configs, with_config_path
from epo_trl.launch.command_line import CHECK, TRACEBACK, ConfigIsRight
from epo_trl.launch.early_check import check_early
from epo_trl.launch.interrupt import CtrlC
from epo_trl.launch.quiet import quiet
from epo_trl.launch.warm_start import find_warm_start, warm_start_command

PACKAGE = Path(__file__).resolve().parents[1]
SECONDS_BEFORE_OTHER_RANKS = 60.0


@dataclass(frozen=True)
class Program:
    """A recipe as a program: a file of the repository, or a command of the package.

    Args:
        name: Name in messages.
        configs: Configs to list, by the name that the user types.
        one: Command for one process, up to `--config`.
        several: Command for several processes, with placeholders: `{settings}`, the name of a file in
            `accelerate_configs`, and `{processes}`, the option for their number.
        read: Converts the typed command line to that of the recipe.
    """

    name: str
    configs: Mapping[str, Path]
    one: str
    several: str
    read: Callable[[Sequence[str]], Sequence[str]] = list


def recipe_file(recipe: Path, patterns: Sequence[str]) -> Program:
    """Creates the program of a recipe file in the repository.

    Args:
        recipe: Path of the file.
        patterns: Glob patterns of its configs, relative to its own folder.
    """
    found = sorted({path for pattern in patterns for path in recipe.parent.glob(f"{pattern}.yaml")})
    launch = f"accelerate launch --config_file accelerate_configs/{{settings}}.yaml{{processes}} {recipe}"
    configs = {str(path): path for path in found}
    return Program(recipe.name, configs, f"python {recipe}", launch)


def shipped_command(name: str) -> Program:
    """Creates the program of `epo-trl train`, `sft`, `evaluate` or `play`, which find shipped configs by name."""
    command = f"epo-trl {name}"
    several = f"{command} --accelerate_config {{settings}}{{processes}}"

    def read(typed: Sequence[str]) -> list[str]:
        words = with_config_path(typed)
        check_early(name, words)
        return words

    return Program(command, list_configs(name), command, several, read)


def run_recipe(main: Callable[[], None], configs: Sequence[str]) -> None:
    """Runs the `main` of a recipe file, see `run_program`.

    Args:
        main: Function that reads the command line and runs the recipe.
        configs: Glob patterns of the recipe's YAML files, relative to its own folder.
    """
    run_program(main, recipe_file(Path(sys.argv[0]), configs))


def run_program(main: Callable[[], None], program: Program) -> None:
    """Runs the `main` of a recipe. Errors meant for the user print one line and exit with 1; Ctrl-C exits with 130.
    Other errors keep their traceback; `--traceback` shows it for all.

    Without arguments it only lists the configs of the recipe and the command for this machine, and exits with 0: after
    a failure, `accelerate launch` would add its own traceback. `--check FILE ...` only checks these configs.

    Args:
        main: Function that reads the command line from `sys.argv` and runs the recipe.
        program: Program that was called.
    """
    quiet()
    with CtrlC(program.name).answered():
        _run(main, program)


def _run(main: Callable[[], None], program: Program) -> None:
    words = [word for word in sys.argv[1:] if word != TRACEBACK]
    with_traceback, sys.argv[1:] = len(words) < len(sys.argv[1:]), words
    if not words:
        if _rank() == 0:
            import torch

            sys.stdout.write(overview(program, torch.accelerator.device_count()))
        return
    if words[0] == CHECK:
        raise SystemExit(check_configs(main, words[1:], program))
    wrong = _what_is_wrong(main, words, program, with_traceback)
    if wrong:
        given = any(word.startswith("--config") for word in words)
        advice = overview(program, 0) if program.configs and not given else ""
        _say_once(f"{program.name}: error: {wrong}\n{advice}")
        raise SystemExit(1)


def check_configs(main: Callable[[], None], configs: Sequence[str], program: Program) -> int:
    """Checks configs and prints the error of each; returns 1 if one is invalid, else 0.

    Args:
        main: `main` of the recipe, which stops after reading the config.
        configs: YAML files.
        program: Program that was called.
    """
    code = 0
    for config in configs:
        wrong = _what_is_wrong(main, ["--config", config, CHECK], program)
        if wrong:
            code = 1
            _say_once(f"{config}: {wrong}\n")
    return code


def _what_is_wrong(
    main: Callable[[], None], words: Sequence[str], program: Program, with_traceback: bool = False
) -> str:
    """Runs `main`; returns the message of its error as one line, or `""`. Other errors are raised."""
    try:
        sys.argv[1:] = program.read(words)
        main()
    except ConfigIsRight:
        pass
    except Exception as error:
        message = str(error) if is_ours(error) else worded(error)
        if with_traceback or not message:
            raise
        return " ".join(message.split())
    return ""


def worded(error: Exception) -> str:
    """Explains a known error of a library and its fix; returns `""` for other errors.

    Args:
        error: The exception.
    """
    if isinstance(error, pickle.UnpicklingError):
        return (
            "model_name_or_path, resume_from_checkpoint: expected tensors, got a pickle of other objects, which could "
            "run code when it is loaded; use safetensors. If you trust the source of the model, convert it: load its "
            f"weights with torch.load(FILE, weights_only=False), save them with save_pretrained ({_first(error)})"
        )
    if isinstance(error, ValueError) and "trust_remote_code" in str(error):
        return (
            f"trust_remote_code: expected true for a model with code of its own, got false: {_first(error)} Read the "
            "code, and set trust_remote_code to true if you trust it, or use a model that transformers supports"
        )
    return ""


def _first(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def is_ours(error: Exception) -> bool:
    """Whether the error is a message for the user: an `EpoTrlError`, or a `raise` of an error in this package.

    Args:
        error: The exception.
    """
    if isinstance(error, EpoTrlError):
        return True
    if isinstance(error, AssertionError) or error.__traceback__ is None:
        return False
    frame, _ = list(walk_tb(error.__traceback__))[-1]
    file = Path(frame.f_code.co_filename).resolve()
    if not file.is_relative_to(PACKAGE) or file.is_relative_to(
        FOLDER.resolve()
    ):  # environments may lie among the recipes
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "RAISE_VARARGS"


def overview(program: Program, gpus: int) -> str:
    """Formats the list of configs, each with the first sentence of its file, and the commands for a machine.

    A config with its own warm start has two commands.

    Args:
        program: Program that runs the recipe.
        gpus: Number of GPUs in the machine.
    """
    width = max(map(len, program.configs), default=0)
    lines = [f"{program.name} needs a config:"]
    lines += [f"  {typed:{width}}  {_about(path)}" for typed, path in program.configs.items()]
    fitting = program.configs.get(_config_for(program, gpus))
    warm_start = find_warm_start(fitting) if fitting else None
    typed = [warm_start_command(warm_start)] if warm_start else []
    lines += [
        f"For this machine, where torch finds {_count(gpus)}:",
        *(f"  {one}" for one in (*typed, command(program, gpus))),
    ]
    lines.append("Options: --help, --help-all")
    return "\n".join(lines) + "\n"


def command(program: Program, gpus: int) -> str:
    """Returns the command for a machine with `gpus` GPUs."""
    config = _config_for(program, gpus)
    if config not in program.configs or "cpu" in program.configs[config].stem:
        return f"{program.one} --config {config}"
    settings = "single_gpu" if gpus == 1 else "zero3"
    processes = "" if gpus in (1, 8) else f" --num_processes {gpus}"
    return f"{program.several.format(settings=settings, processes=processes)} --config {config}"


def _config_for(program: Program, gpus: int) -> str:
    size = "cpu" if gpus == 0 else "1gpu" if gpus == 1 else "8gpu"
    stems = {typed: path.stem for typed, path in program.configs.items()}
    fitting = [typed for typed in stems if size in stems[typed]] or [typed for typed in stems if "cpu" in stems[typed]]
    return min(fitting, key=lambda typed: len(stems[typed]), default="FILE")


def _about(path: Path) -> str:
    sentence = re.match(r"# (.+?\.)(?=\s)", path.read_text(encoding="utf-8"))
    return sentence[1] if sentence else ""


def _count(gpus: int) -> str:
    return {0: "no GPU", 1: "one GPU"}.get(gpus, f"{gpus} GPUs")


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _say_once(text: str) -> None:
    """Writes to stderr from the first rank.

    Usually all ranks have the same error, and the launcher ends the others after the first. A rank that still runs
    a minute later has an error that the first does not have, and prints it.
    """
    if _rank():
        time.sleep(SECONDS_BEFORE_OTHER_RANKS)
    sys.stderr.write(spelled(text))  # the text may quote an environment or a file
    sys.stderr.flush()
