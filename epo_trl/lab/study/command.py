"""`epo-trl study`: run methods x seeds from one file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from epo_trl.cli.base import at_least, fail, make_parser, say
from epo_trl.errors import one_line


def main(argv: Sequence[str]) -> int:
    """Runs the study, writes the report, and returns the exit code: 0, or 1 if a run has failed."""
    parser = make_parser(
        "study", "Runs the missing parts of a study and writes its report. Repeat the command to resume."
    )
    add = parser.add_argument
    add("config", metavar="CONFIG", help="YAML file, see docs/study.md, or the name of a shipped study, such as smoke")
    add("--arms", nargs="+", metavar="NAME", help="only these arms (default: all)")
    add("--seeds", nargs="+", type=at_least(0), metavar="S", help="seeds that replace those of the file")
    add("--jobs", type=at_least(1), metavar="N", help="parallel runs (default: cores / threads)")
    add("--threads", type=at_least(1), default=1, metavar="N", help="threads per run (default: 1)")
    add("--runs-dir", metavar="DIR", help="folder of the runs (default: runs/NAME)")
    add("--results-dir", metavar="DIR", help="folder of the results (default: results/NAME)")
    add("--report-only", action="store_true", help="write a report of existing results without running anything")
    args = parser.parse_args(argv)
    try:
        from epo_trl.lab.study.study_report import write_report
    except ImportError as error:  # scipy
        return fail(f"{error}; pip install 'epo-trl[study]'")
    from epo_trl.lab.study.config import load_study, plan
    from epo_trl.lab.study.record import RECORDS, read_records
    from epo_trl.lab.study.runner import Runner, known_records
    from epo_trl.runs.run_lock import make_folder

    complete = load_study(args.config)
    chosen = complete.chosen(args.arms, args.seeds)
    shown = complete.joined(chosen)
    runs, results = Path(args.runs_dir or f"runs/{shown.name}"), Path(args.results_dir or f"results/{shown.name}")
    # Fail before the first run if results cannot be written, or if the report would reject a record.
    make_folder(results, "--results-dir")
    known_records(plan(shown, runs), results)
    cores = len(os.sched_getaffinity(0))
    runner = Runner(runs, results, args.jobs or max(1, cores // args.threads), args.threads)
    try:
        failed = {} if args.report_only else runner.run_missing(plan(chosen, runs))
    except KeyboardInterrupt:
        return fail("interrupted; repeat the command to resume from the last checkpoints")
    for name, why in failed.items():
        sys.stderr.write(f"failed: {name}: {one_line(why)}\n")
    records = known_records(plan(shown, runs), results)
    for file in write_report(shown, [*records.values()], results):
        say(f"wrote {file}")
    if others := sorted(read_records(results / RECORDS).keys() - records):
        say(f"not in the report, since neither {args.config} nor --seeds names them: {', '.join(others)}")
    return 1 if failed else 0
