"""A recipe as a program: what it says when it is called with nothing, and when something is wrong."""

from __future__ import annotations

import dis
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import walk_tb

import torch

from epo_trl.envs.base import EnvError
from epo_trl.launch.options import CHECK, ConfigIsRight

PACKAGE = Path(__file__).parents[1]
SECONDS_BEFORE_OTHER_RANKS = 60.0


def run_recipe(main: Callable[[], None], configs: Sequence[str]) -> None:
    """Runs a recipe's `main`. Errors of ours are one line and exit code 1, without a traceback.

    Called with no argument at all it runs nothing: it lists the recipe's configs and the command for this machine. That
    is help that was asked for, and no failure: after one, `accelerate launch` would add a traceback of its own.
    `--check FILE ...` reads these configs and runs nothing either.

    Args:
        main: Reads the command line.
        configs: Patterns of the recipe's YAML files, from its own folder.
    """
    recipe = Path(sys.argv[0])
    if not sys.argv[1:]:
        if _rank() == 0:
            sys.stdout.write(overview(recipe, configs, torch.accelerator.device_count()))
        return
    if sys.argv[1] == CHECK:
        raise SystemExit(check_configs(main, sys.argv[2:]))
    wrong = _what_is_wrong(main)
    if wrong:
        advice = "" if any(word.startswith("--config") for word in sys.argv) else overview(recipe, configs, 0)
        _say_once(f"{recipe.name}: error: {wrong}\n{advice}")
        raise SystemExit(1)


def check_configs(main: Callable[[], None], configs: Sequence[str]) -> int:
    """Returns 1 if one of the configs is not what the recipe takes, else 0; says what is wrong with each.

    Args:
        main: The recipe's; it gets no further than reading the config.
        configs: YAML files.
    """
    code = 0
    for config in configs:
        sys.argv[1:] = ["--config", config, CHECK]
        wrong = _what_is_wrong(main)
        if wrong:
            code = 1
            _say_once(f"{config}: {wrong}\n")
    return code


def _what_is_wrong(main: Callable[[], None]) -> str:
    """Returns the message of an error of ours, in one line, after `main` has run; `""` if there was none."""
    try:
        main()
    except ConfigIsRight:
        pass
    except Exception as error:
        if not is_ours(error):
            raise
        return " ".join(str(error).split())
    return ""


def is_ours(error: Exception) -> bool:
    """Whether the error is a message for the user: a `raise` of this package or of a recipe, not a bug."""
    if isinstance(error, EnvError):
        return True
    if isinstance(error, AssertionError) or error.__traceback__ is None:
        return False
    frame, _ = list(walk_tb(error.__traceback__))[-1]
    folders = (PACKAGE, Path(sys.argv[0]).resolve().parent)
    if not any(Path(frame.f_code.co_filename).resolve().is_relative_to(folder) for folder in folders):
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "RAISE_VARARGS"


def overview(recipe: Path, configs: Sequence[str], gpus: int) -> str:
    """Returns the recipe's configs, each with the first sentence of its file, and the command for a machine.

    Args:
        recipe: The recipe's file.
        configs: Patterns, from its folder.
        gpus: How many the machine has.
    """
    found = sorted({path for pattern in configs for path in recipe.parent.glob(f"{pattern}.yaml")})
    width = max((len(str(path)) for path in found), default=0)
    lines = [f"{recipe.name} takes a config:"] + [f"  {path!s:{width}}  {_about(path)}" for path in found]
    lines += [f"Here torch sees {_count(gpus)}:", f"  {command(recipe, found, gpus)}", "Every option: --help"]
    return "\n".join(lines) + "\n"


def command(recipe: Path, configs: Sequence[Path], gpus: int) -> str:
    """Returns what to type on a machine with so many GPUs."""
    size = "cpu" if gpus == 0 else "1gpu" if gpus == 1 else "8gpu"
    fitting = [path for path in configs if size in path.stem] or [path for path in configs if "cpu" in path.stem]
    config = min(fitting, key=lambda path: len(path.stem), default="FILE")
    if not fitting or "cpu" in fitting[0].stem:
        return f"python {recipe} --config {config}"
    settings = "single_gpu.yaml" if gpus == 1 else "zero3.yaml"
    processes = "" if gpus in (1, 8) else f" --num_processes {gpus}"
    return f"accelerate launch --config_file accelerate_configs/{settings}{processes} {recipe} --config {config}"


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
    sys.stderr.write(text)
    sys.stderr.flush()
