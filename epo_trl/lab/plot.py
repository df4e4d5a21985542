"""`epo-trl plot`: plot the curves of runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from epo_trl.cli.base import at_least, make_parser, need_file, say


def main(argv: Sequence[str]) -> int:
    """Writes the image and returns the exit code."""
    args = _parser().parse_args(argv)
    from epo_trl.lab.plots import plot_runs

    need_file(args.out)
    path = plot_runs(args.runs, args.out, labels=args.labels, window=args.window)
    say(f"wrote {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "plot", "Draws training reward, training, IID and OOD success, and the entropy of early and late turns."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output directory of a training run")
    parser.add_argument("--out", required=True, metavar="PNG", help="image file to write")
    parser.add_argument(
        "--labels",
        nargs="+",
        metavar="LABEL",
        help="one label per run; runs with equal labels are averaged (default: the directory's name without -seedN, "
        "after its folder where runs of several folders would share it)",
    )
    parser.add_argument(
        "--window", type=at_least(1), default=10, help="number of points in the running mean (default: 10)"
    )
    return parser
