"""`epo-trl watch`: writes a page of the stored episodes of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from epo_trl.cli.base import at_least, make_parser, say


def main(argv: Sequence[str]) -> int:
    """Writes the page and returns the exit code."""
    parser = make_parser("watch", "Writes an HTML page of the stored episodes of a run.")
    parser.add_argument("run", metavar="RUN", help="output directory of a training run, or --output of an evaluation")
    parser.add_argument("--out", metavar="HTML", help="page to write (default: in or beside RUN)")
    parser.add_argument(
        "--max-mb", type=at_least(1), default=20, metavar="MB", help="maximum size of the page (default: 20)"
    )
    args = parser.parse_args(argv)
    from epo_trl.runs.files import write_atomically
    from epo_trl.watch.page import render_page
    from epo_trl.watch.source import find_samples

    samples, run = find_samples(args.run), Path(args.run)
    beside = run / "episodes.html" if run.is_dir() else Path(f"{args.run.removesuffix('.json')}.html")
    out = Path(args.out or beside)
    page, left_out = render_page(samples, run.resolve().name, args.max_mb * 2**20)
    write_atomically(out, page)
    say(f"wrote {out} ({out.stat().st_size / 2**20:.1f} MB). {left_out}".rstrip())
    return 0
