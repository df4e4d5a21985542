"""Prints the result of `make smoke` and the next steps.

python recipes/smoke_result.py runs/smoke-test/grpo_epo
"""

import sys
from pathlib import Path

from epo_trl.lab.plots import read_run

SUCCESS = "train/env/success_rate"
NEXT = (
    "next: make train            ALFWorld-style games, 20 to 45 minutes on two cores\n"
    "      epo-trl play trap     play a game yourself (.venv/bin/epo-trl, if .venv is not active)"
)


def result(run: Path) -> str:
    """Formats the result from the TensorBoard files of a run."""
    steps, success = read_run(run, [SUCCESS])[SUCCESS]
    shares = (
        f"{success[0]:.0%} of its training episodes in RL step {steps[0]}, {success[-1]:.0%} in RL step {steps[-1]}"
    )
    return f"make smoke: everything works. The guessing game was won in {shares}.\n{NEXT}\n"


if __name__ == "__main__":
    sys.stdout.write(result(Path(sys.argv[1])))
