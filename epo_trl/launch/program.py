"""A recipe as a program: what it says when it is called with nothing, and when something is wrong."""

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

from epo_trl.envs.base import EnvError
from epo_trl.evaluation.samples import spelled
from epo_trl.launch.command_line import CHECK, ConfigIsRight
from epo_trl.launch.early_check import check_early
from epo_trl.launch.interrupt import CtrlC
from epo_trl.launch.quiet import quiet
from epo_trl.launch.shipped import FOLDER, configs_of, with_shipped_config
from epo_trl.launch.warm_start import warm_start_command, warm_start_of

PACKAGE = Path(__file__).resolve().parents[1]
SECONDS_BEFORE_OTHER_RANKS = 60.0


@dataclass(frozen=True)
class Program:
    """A recipe as one calls it: a file of the repository, or a command of the package.

    Args:
        name: In messages.
        configs: Those that it lists, by what one types for them.
        one: Command for a single process, up to `--config`.
        several: For several; `{settings}` is the name of a file in `accelerate_configs`, `{processes}` their number.
        folder: Folder of the recipes; an exception raised there is a message for the user.
        read: Returns the words that the recipe takes, from those that were typed.
    """

    name: str
    configs: Mapping[str, Path]
    one: str
    several: str
    folder: Path
    read: Callable[[Sequence[str]], Sequence[str]] = list


def recipe_file(recipe: Path, patterns: Sequence[str]) -> Program:
    """Returns a file of the repository as a program.

    Args:
        recipe: The file.
        patterns: Glob patterns of its configs, relative to its own folder.
    """
    found = sorted({path for pattern in patterns for path in recipe.parent.glob(f"{pattern}.yaml")})
    launch = f"accelerate launch --config_file accelerate_configs/{{settings}}.yaml{{processes}} {recipe}"
    configs = {str(path): path for path in found}
    return Program(recipe.name, configs, f"python {recipe}", launch, recipe.resolve().parent)


def shipped_command(name: str) -> Program:
    """Returns `epo-trl train`, `sft`, `evaluate` or `play`, which know the shipped configs by name."""
    command = f"epo-trl {name}"
    several = f"{command} --accelerate_config {{settings}}{{processes}}"

    def read(typed: Sequence[str]) -> list[str]:
        words = with_shipped_config(typed)
        check_early(name, words)
        return words

    return Program(command, configs_of(name), command, several, FOLDER.resolve(), read)


def run_recipe(main: Callable[[], None], configs: Sequence[str]) -> None:
    """Runs the `main` of the file that was called, see `run_program`.

    Args:
        main: Reads the command line.
        configs: Patterns of the recipe's YAML files, from its own folder.
    """
    run_program(main, recipe_file(Path(sys.argv[0]), configs))


def run_program(main: Callable[[], None], program: Program) -> None:
    """Runs a recipe's `main`. Errors of ours are one line and exit code 1, without a traceback; Ctrl-C is one and 130.

    Called with no argument at all it runs nothing: it lists the recipe's configs and the command for this machine. That
    is help that was asked for, and no failure: after one, `accelerate launch` would add a traceback of its own.
    `--check FILE ...` reads these configs and runs nothing either.

    Args:
        main: Reads the command line, `sys.argv`.
        program: Program that was called.
    """
    quiet()
    with CtrlC(program.name).answered():
        _run(main, program)


def _run(main: Callable[[], None], program: Program) -> None:
    words = sys.argv[1:]
    if not words:
        if _rank() == 0:
            import torch

            sys.stdout.write(overview(program, torch.accelerator.device_count()))
        return
    if words[0] == CHECK:
        raise SystemExit(check_configs(main, words[1:], program))
    wrong = _what_is_wrong(main, words, program)
    if wrong:
        given = any(word.startswith("--config") for word in words)
        advice = overview(program, 0) if program.configs and not given else ""
        _say_once(f"{program.name}: error: {wrong}\n{advice}")
        raise SystemExit(1)


def check_configs(main: Callable[[], None], configs: Sequence[str], program: Program) -> int:
    """Returns 1 if one of the configs is not what the recipe takes, else 0; says what is wrong with each.

    Args:
        main: The recipe's; it gets no further than reading the config.
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


def _what_is_wrong(main: Callable[[], None], words: Sequence[str], program: Program) -> str:
    """Returns the message of an error of ours, in one line, after `main` has run; `""` if there was none."""
    try:
        sys.argv[1:] = program.read(words)
        main()
    except ConfigIsRight:
        pass
    except Exception as error:
        said = str(error) if is_ours(error, program.folder) else worded(error)
        if not said:
            raise
        return " ".join(said.split())
    return ""


def worded(error: Exception) -> str:
    """Returns what a user can do about an error of a library; `""` for errors that are not known here.

    Args:
        error: The exception.
    """
    if isinstance(error, pickle.UnpicklingError):
        return (
            "model_name_or_path, resume_from_checkpoint: expected tensors, got a pickle of other objects, which could "
            "run code when it is loaded; take safetensors. If you trust who made the model, convert it: load its "
            f"weights with torch.load(FILE, weights_only=False), save them with save_pretrained ({_first(error)})"
        )
    if isinstance(error, ValueError) and "trust_remote_code" in str(error):
        return (
            f"trust_remote_code: expected true for a model with code of its own, got false: {_first(error)} Read the "
            "code, and set trust_remote_code to true if you trust it, or take a model that transformers knows"
        )
    return ""


def _first(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def is_ours(error: Exception, recipes: Path) -> bool:
    """Whether the error is a message for the user: a `raise` of this package or of a recipe, not a bug.

    Args:
        error: The exception.
        recipes: Folder of the recipes.
    """
    if isinstance(error, EnvError):
        return True
    if isinstance(error, AssertionError) or error.__traceback__ is None:
        return False
    frame, _ = list(walk_tb(error.__traceback__))[-1]
    if not any(Path(frame.f_code.co_filename).resolve().is_relative_to(folder) for folder in (PACKAGE, recipes)):
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "RAISE_VARARGS"


def overview(program: Program, gpus: int) -> str:
    """Returns the recipe's configs, each with the first sentence of its file, and the commands for a machine.

    Two commands for a config with a warm start of its own.

    Args:
        program: Program that runs the recipe.
        gpus: Number of GPUs in the machine.
    """
    width = max(map(len, program.configs), default=0)
    lines = [f"{program.name} takes a config:"]
    lines += [f"  {typed:{width}}  {_about(path)}" for typed, path in program.configs.items()]
    fitting = program.configs.get(_config_for(program, gpus))
    warm_start = warm_start_of(fitting) if fitting else None
    typed = [warm_start_command(warm_start)] if warm_start else []
    lines += [f"Here torch sees {_count(gpus)}:", *(f"  {one}" for one in (*typed, command(program, gpus)))]
    lines.append("Every option: --help")
    return "\n".join(lines) + "\n"


def command(program: Program, gpus: int) -> str:
    """Returns what to type on a machine with so many GPUs."""
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
    """Writes to stderr, from the first rank.

    As a rule all ranks have the same error, and the launcher ends the others when the first has ended. A rank that is
    still there a minute later is alone with its error, and says it.
    """
    if _rank():
        time.sleep(SECONDS_BEFORE_OTHER_RANKS)
    sys.stderr.write(spelled(text))  # it may quote what an environment or a file has said
    sys.stderr.flush()
