"""`epo-trl study`: run methods x seeds from one file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from epo_trl.cli.base import at_least, fail, make_parser


def main(argv: Sequence[str]) -> int:
    """Runs the study, writes the report, and returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        from epo_trl.study.command import study
    except ImportError as error:
        return fail(f"{error}; pip install 'epo-trl[study]'")
    options = {name: value for name, value in vars(args).items() if name != "config"}
    try:
        return study(args.config, **options)
    except KeyboardInterrupt:
        return fail("interrupted; repeat the command to resume from the last checkpoints")


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "study", "Runs the missing parts of a study and writes its report. Repeat the command to resume."
    )
    parser.add_argument(
        "config", metavar="CONFIG", help="YAML file, see docs/study.md, or the name of a shipped study: smoke"
    )
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="only these arms (default: all)")
    parser.add_argument(
        "--seeds", nargs="+", type=at_least(0), metavar="S", help="seeds that replace those of the file"
    )
    parser.add_argument("--jobs", type=at_least(1), metavar="N", help="parallel runs (default: cores / threads)")
    parser.add_argument("--threads", type=at_least(1), default=1, metavar="N", help="threads per run (default: 1)")
    parser.add_argument("--runs-dir", metavar="DIR", help="folder of the runs (default: runs/NAME)")
    parser.add_argument("--results-dir", metavar="DIR", help="folder of the results (default: results/NAME)")
    parser.add_argument(
        "--report-only", action="store_true", help="write a report of existing results without running anything"
    )
    return parser
