"""Runs TRL and this package in the race, every system with every seed in turn.

    python benchmarks/race/run.py --budget 240 --seeds 0 1 2

A finished run is not repeated. AgileRL runs in its own environment, with agilerl_ppo.py.
"""

import epo_trl.threads  # noqa: F401 - before torch

import gc
from functools import partial

import ours
import trl_grpo
from settings import open_clock, parser

SYSTEMS = {"trl_grpo": trl_grpo.race, "ours_grpo": partial(ours.race, "grpo"), "ours_ppo": partial(ours.race, "ppo")}


def main() -> None:
    """Runs what has not been run."""
    options = parser(__doc__)
    options.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), default=list(SYSTEMS))
    args = options.parse_args()
    for seed in args.seeds:
        for name in args.systems:
            clock = open_clock(args, name, seed)
            if clock is not None:
                SYSTEMS[name](args.folder / "warm", clock, seed)
                gc.collect()


if __name__ == "__main__":
    main()
