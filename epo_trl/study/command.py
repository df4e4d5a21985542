"""`epo-trl study`: runs the missing runs, then writes the report."""

from __future__ import annotations

import sys
from pathlib import Path

from epo_trl.long_runs.folder_lock import make_folder
from epo_trl.study.config import load_study
from epo_trl.study.run_plan import plan
from epo_trl.study.runner import Places, cores, known_record, run_missing
from epo_trl.study.study_report import write_report


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
    """Runs a study and writes its report. Returns the exit code: 0, or 1 if a run has failed.

    Args:
        config: YAML file of the study.
        arms: Names of the arms to run; all by default.
        seeds: Seeds of each arm, in place of the file's.
        jobs: Number of parallel runs; by default as many as the cores allow.
        threads: Number of threads per run.
        runs_dir: Folder of the runs; `runs/<name>` by default.
        results_dir: Folder of the results; `results/<name>` by default.
        report_only: Whether to write only the report and start no run.
    """
    complete = load_study(config)
    chosen = complete.chosen(arms, seeds)
    places = Places(Path(runs_dir or f"runs/{complete.name}"), Path(results_dir or f"results/{complete.name}"))
    make_folder(places.results, "--results-dir")  # fail before the first run if results cannot be written
    shown = complete.joined(chosen)
    runs = plan(shown, places.runs)
    for run in runs:
        known_record(run, places)  # fail before the first run if the report would reject a record
    failed = {} if report_only else run_missing(chosen, places, jobs or max(1, cores() // threads), threads)
    for name, why in failed.items():
        sys.stderr.write(f"failed: {name}: {why}\n")
    records = [record for run in runs if (record := known_record(run, places)) is not None]
    for file in write_report(shown, records, places.results):
        sys.stdout.write(f"wrote {file}\n")
    left_out = places.recorded() - {run.name for run in runs}
    if left_out:
        sys.stdout.write(
            f"not in the report, since neither {config} nor --seeds names them: {', '.join(sorted(left_out))}\n"
        )
    return 1 if failed else 0
