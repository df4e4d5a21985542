"""Counts what a reader follows: the functions and files of epo_trl that run on the way to a result.

    python benchmarks/hops.py           # from the command line to the first rollout, and what a method adds
    python benchmarks/hops.py --list    # also names the functions, by file

A function counts once, however often it is called; bodies of modules and classes, comprehensions and the methods that
`dataclass` generates do not count. A method adds what runs in an RL step with it and not without it.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from harness import table

import epo_trl

Function = tuple[str, str]  # file, relative to the package, and qualified name
PACKAGE = Path(epo_trl.__file__).resolve().parent
STEPS = ["--max_steps", "1", "--save_strategy", "no", "--report_to", "none"]
PLAIN = ["--entropy_method", "epo", "--method_kwargs", "{}"]  # with epo_lambda: 0, which the config sets
METHODS = {
    "ref-nucleus": ["--entropy_method", "ref-nucleus", "--method_kwargs", '{"ref-nucleus": {"weight": 0.01}}'],
    "gigpo": [*PLAIN, "--credit", "gigpo"],
}


class FirstRollout(BaseException):
    """Ends a command where its first rollout begins."""


def functions_run(argv: Sequence[str], to_first_rollout: bool) -> set[Function]:
    """Runs a command of `epo-trl` and returns the functions of epo_trl that ran. Call it once per process.

    Args:
        argv: Words after `epo-trl`.
        to_first_rollout: Whether to end the command where the first rollout begins.
    """
    from epo_trl.cli import main

    codes: set[CodeType] = set()

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)
            if to_first_rollout and frame.f_code.co_name == "play_episodes":
                raise FirstRollout

    threading.setprofile(record)
    sys.setprofile(record)
    with contextlib.suppress(FirstRollout):
        main(argv)
    sys.setprofile(None)
    files = {code: Path(code.co_filename).resolve() for code in tuple(codes)}  # other threads still add to it
    return {
        (str(file.relative_to(PACKAGE)), code.co_qualname)
        for code, file in files.items()
        if file.is_relative_to(PACKAGE)
        and code.co_flags & inspect.CO_NEWLOCALS
        and not code.co_name.endswith(("comp>", "genexpr>"))
    }


def in_new_process(folder: Path, options: Sequence[str], to_first_rollout: bool = False) -> set[Function]:
    """Returns the functions that a training command runs."""
    argv = ["train", "--config", "trap/tiny_cpu", "--model_name_or_path", str(folder / "sft"), *STEPS, *options]
    with tempfile.TemporaryDirectory(dir=folder) as run:
        asked = json.dumps([[*argv, "--output_dir", run], to_first_rollout])
        out = Path(run, "functions.json")
        subprocess.run([sys.executable, __file__, "--worker", asked, str(out)], check=True, stdout=subprocess.DEVNULL)
        return {(file, name) for file, name in json.loads(out.read_text())}


def main() -> None:
    """Counts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="also name the functions, by file")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        Path(args.worker[1]).write_text(json.dumps(sorted(functions_run(*json.loads(args.worker[0])))))
        return
    os.environ["PYTHONPATH"] = str(PACKAGE.parent)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sft = [sys.executable, "-m", "epo_trl.cli", "sft", "--config", "trap/sft_tiny_cpu", "--episodes", "8", *STEPS]
        subprocess.run([*sft, "--output_dir", str(folder / "sft")], check=True, stdout=subprocess.DEVNULL)
        found = {"to the first rollout": in_new_process(folder, PLAIN, to_first_rollout=True)}
        plain = in_new_process(folder, PLAIN)
        for method, options in METHODS.items():
            found[f"added by {method}"] = in_new_process(folder, options) - plain
    rows = [[title, len(functions), len({file for file, _ in functions})] for title, functions in found.items()]
    print(table(["", "functions", "files"], rows))
    if args.list:
        for title, functions in found.items():
            print(f"\n{title}")
            for file in sorted({file for file, _ in functions}):
                print(f"  {file}: {', '.join(sorted(name for other, name in functions if other == file))}")


if __name__ == "__main__":
    main()
