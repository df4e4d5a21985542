"""`epo-trl doctor`: report what works on this machine, what is missing, and how to fix it."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Sequence

from epo_trl.cli.base import fail, make_parser, say


def main(argv: Sequence[str]) -> int:
    """Prints the findings; returns 1 if something that every run needs is missing or broken, else 0."""
    args = _parser().parse_args(argv)
    try:
        from epo_trl.lab.doctor import as_json, as_text, examine
    except ImportError as error:  # packaging, which parses the versions
        return fail(f"{error}; pip install --force-reinstall epo-trl")
    faulthandler.enable(2)  # names the import that ends the process
    if sys.stderr.isatty():
        sys.stderr.write("importing all libraries, this takes a few seconds ...\n")
    findings = examine(online=args.online)
    say(as_json(findings) if args.json else as_text(findings, colour=sys.stdout.isatty()))
    return int(any(finding.is_fatal for finding in findings))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "doctor",
        "Reports what works on this machine, what is missing, and the command that fixes it. Exits with 1 only if "
        "something that every run needs is missing or broken. Nothing leaves the machine without --online.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--online", action="store_true", help="check that the Hub can be reached")
    return parser
