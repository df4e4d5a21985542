"""Counts what a reader has to follow from `epo-trl train` to the first rollout: functions and files of `epo_trl`.

A function counts once, when Python enters it between the command line and the first call of the rollout loop, in the
process of the run: `trap/tiny_cpu` after a short warm start. Bodies of modules and classes and comprehensions do not
count, nor do methods that `dataclasses` writes.

    python benchmarks/hops.py           # 150 functions in 40 files is the goal
    python benchmarks/hops.py --list    # each file with its functions, in the order of the first call
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import epo_trl
from epo_trl.cli import main

PACKAGE = Path(epo_trl.__file__).parent
LOOP = ("rollout/loop.py", "finished_episodes")
WARM_START = "sft --config trap/sft_tiny_cpu --max_steps 1 --episodes 16 --report_to none"
COMMAND = "train --config trap/tiny_cpu --max_steps 1 --report_to none"


class FirstRollout(BaseException):
    """The rollout loop was entered. No `except Exception` on the way stops it."""


def entered_functions(command: list[str]) -> list[tuple[str, str]]:
    """Runs `epo-trl` up to its first rollout; returns file and qualified name of each function that was entered."""
    seen: dict[CodeType, tuple[str, str]] = {}

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code in seen or not code.co_filename.startswith(str(PACKAGE)):
            return
        name = code.co_name
        is_body = not code.co_flags & 2  # CO_NEWLOCALS: a function has its own locals, a class's or module's body not
        if is_body or name in ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"):
            return
        seen[code] = (str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname)
        if seen[code] == LOOP:
            sys.setprofile(None)
            raise FirstRollout

    sys.setprofile(enter)
    try:
        main(command)
    except FirstRollout:
        return list(seen.values())
    finally:
        sys.setprofile(None)
    raise RuntimeError("the command ended without a rollout")


def measure() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        warm_start = [*WARM_START.split(), "--output_dir", f"{folder}/sft"]
        subprocess.run([sys.executable, "-m", "epo_trl.cli", *warm_start], check=True, capture_output=True)
        found = entered_functions(
            [*COMMAND.split(), "--model_name_or_path", f"{folder}/sft", "--output_dir", f"{folder}/rl"]
        )
    by_file: dict[str, list[str]] = {}
    for file, name in found:
        by_file.setdefault(file, []).append(name)
    if args.list:
        for file, names in by_file.items():
            print(f"{file} ({len(names)}): {', '.join(names)}")
    print(f"{len(found)} functions in {len(by_file)} files")


if __name__ == "__main__":
    measure()
