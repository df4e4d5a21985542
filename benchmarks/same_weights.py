"""Checks that the trainers of another revision learn the same weights, bit by bit.

    python benchmarks/same_weights.py main                # one process: equal to the last bit, or exit code 1
    python benchmarks/same_weights.py main --distributed  # two: DDP and ZeRO-3, equal to within 1e-6

For a refactoring that should change nothing: GRPO and PPO, each without and with EPO, play generated ALFWorld games and
Corridor for ten RL steps from the same seed and the same half-trained tiny models, once with the trainers of REVISION
and once with those of the files here. `moved` is how far training moved the weights; `first difference` is the first
optimizer step with a different number in its log, and that number's name.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
from harness import run_program, table
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("same_weights_worker.py")
ALLOWED = {"one": 0.0, "ddp": 1e-6, "zero3": 1e-6}  # largest difference of a weight
TWO_PROCESSES = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
# Log entries that do not depend on what was learned.
TIMES = ("time/", "step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")

Weights = dict[str, Tensor]


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """Checks out the files of a revision into a temporary folder."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), revision], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def train(tree: Path, mode: str, start: Path, folder: Path, runs: Sequence[str]) -> None:
    """Trains all runs with the `epo_trl` of a tree, or exits with the process's output."""
    folder.mkdir(parents=True)
    launcher = TWO_PROCESSES if mode != "one" else []
    words = [*launcher, str(WORKER), mode, str(start), str(folder), *runs]
    output = run_program(words, folder / "log.txt", tree=tree, folder=folder)
    assert f"epo_trl of {tree}" in output, output


def difference(one: Weights, other: Weights, part: str) -> float:
    """Computes the largest absolute difference between the weights of a part; infinity if their names differ."""
    names = {name for name in one.keys() | other.keys() if name.startswith(part)}
    pairs = [(one.get(name), other.get(name)) for name in names]
    if any(a is None or b is None or a.shape != b.shape for a, b in pairs):
        return math.inf
    apart = [float((a.double() - b.double()).abs().max()) for a, b in pairs if a is not None and b is not None]
    return max((math.inf if math.isnan(x) else x for x in apart), default=0.0)


def first_difference(one: Path, other: Path) -> str:
    """Finds the first different number under the same name in two logs."""
    for a, b in zip(*(json.loads(path.read_text()) for path in (one, other)), strict=False):
        for name in a.keys() & b.keys():
            if a[name] != b[name] and not name.startswith(TIMES):
                return f"{a['step']}: {name}"
    return ""


def compare(mode: str, start: Path, old: Path, new: Path) -> tuple[list[list[str]], bool]:
    """Returns rows of the table for the runs in two folders, and whether all are within the tolerance."""
    rows, fine = [], True
    for path in sorted(old.glob("*.safetensors")):
        before, after = safetensors.torch.load_file(path), safetensors.torch.load_file(new / path.name)
        first = safetensors.torch.load_file(start / path.stem.split("-")[0] / "model.safetensors")
        moved = difference({f"policy.{name}": weight for name, weight in first.items()}, before, "policy.")
        apart = [difference(before, after, part) for part in ("policy.", "critic.")]
        fine = fine and max(apart) <= ALLOWED[mode] and 1e-3 < moved < math.inf
        shown = [f"{x:.1e}" if x else "equal" for x in apart]
        if not any(name.startswith("critic.") for name in before):
            shown[1] = ""
        logs = [path.with_suffix(".json"), new / f"{path.stem}.json"]
        rows.append([mode, path.stem, *shown, f"{moved:.1e}", first_difference(*logs)])
    return rows, fine


def main() -> None:
    """Trains with both revisions, prints the table and exits with 1 if the weights are not equal."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("revision", help="revision to compare with: a commit, a branch, HEAD")
    args.add_argument("--distributed", action="store_true", help="two processes, with DDP and with ZeRO-3")
    args.add_argument("--runs", nargs="+", default=[], help="only these runs, for example corridor-ppo-epo")
    given = args.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the checked-out files are removed too
    rows, all_fine = [], True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        with checked_out(given.revision, folder / "tree") as tree:
            for mode in ("ddp", "zero3") if given.distributed else ("one",):
                for name, where in (("old", tree), ("new", ROOT)):
                    train(where, mode, folder / "start", folder / name / mode, given.runs)
                found, fine = compare(mode, folder / "start", *(folder / name / mode for name in ("old", "new")))
                rows += found
                all_fine = all_fine and fine
    print(table(["processes", "run", "policy", "critic", "moved", "first difference"], rows))
    raise SystemExit(0 if all_fine else 1)


if __name__ == "__main__":
    main()
