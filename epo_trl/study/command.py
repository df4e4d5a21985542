"""`epo-trl study`: runs what is missing, then writes what is known."""

from __future__ import annotations

import sys
from pathlib import Path

from epo_trl.long_runs.folder_lock import make_folder
from epo_trl.study.config import load_study
from epo_trl.study.plan import plan
from epo_trl.study.report import write_report
from epo_trl.study.runner import Places, cores, known_record, run_missing


def study(
    config: str,
    *,
    arms: list[str] | None = None,
    seeds: list[int] | None = None,
    jobs: int | None = None,
    threads: int = 1,
    runs_dir: str | None = None,
    results_dir: str | None = None,
    report_only: bool = False,
) -> int:
    """Returns the exit code: 0, or 1 if a run has failed.

    Args:
        config: The YAML file.
        arms: Only these methods.
        seeds: These seeds for each of them, instead of the file's.
        jobs: Runs side by side; as many as there are cores for, if not given.
        threads: Threads of a run.
        runs_dir: Where runs are kept, `runs/<name>` if not given.
        results_dir: Where results are kept, `results/<name>` if not given.
        report_only: Whether nothing is run.
    """
    whole = load_study(config)
    chosen = whole.chosen(arms, seeds)
    places = Places(Path(runs_dir or f"runs/{whole.name}"), Path(results_dir or f"results/{whole.name}"))
    make_folder(places.results, "--results-dir")  # what can have no results is refused before anything is run
    shown = whole.joined(chosen)
    runs = plan(shown, places.runs)
    for run in runs:
        known_record(run, places)  # what the report will refuse is said before anything is run
    failed = {} if report_only else run_missing(chosen, places, jobs or max(1, cores() // threads), threads)
    for name, why in failed.items():
        sys.stderr.write(f"failed: {name}: {why}\n")
    records = [record for run in runs if (record := known_record(run, places)) is not None]
    for file in write_report(shown, records, places.results):
        sys.stdout.write(f"wrote {file}\n")
    left_out = places.kept() - {run.name for run in runs}
    if left_out:
        sys.stdout.write(
            f"not in the report, since neither {config} nor --seeds names them: {', '.join(sorted(left_out))}\n"
        )
    return 1 if failed else 0
