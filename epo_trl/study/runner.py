"""Runs the missing runs of a study."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from epo_trl.long_runs.folder_lock import folder_lock
from epo_trl.long_runs.state_file import read_state, write_state
from epo_trl.study.check import check_configs
from epo_trl.study.config import Study, StudyError
from epo_trl.study.job_pool import Job, run_jobs
from epo_trl.study.record import Record, collect, read_record, write_record, write_text
from epo_trl.study.run_plan import StudyRun, plan
from epo_trl.study.study_progress import LOG, Watch, clock

CONFIG = "config.yaml"  # in the folder of a run
STOPPING = "stopping: the runs save a checkpoint; press Ctrl-C again to kill them"
STATE = "_study.json"  # also there: seconds of earlier attempts, and checksums of finished runs


@dataclass(frozen=True, slots=True)
class Places:
    """Output folders of a study.

    Args:
        runs: Folder of the runs, each in its own subfolder.
        results: Folder of the report and the records.
    """

    runs: Path
    results: Path

    def record_path(self, run: StudyRun) -> Path:
        """Returns the path of a run's record."""
        return self.results / "runs" / f"{run.name}.json"

    def kept(self) -> set[str]:
        """Returns the names of all runs with a record, including those of other studies."""
        return {path.stem for path in (self.results / "runs").glob("*.json")}


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_missing(study: Study, places: Places, jobs: int, threads: int) -> dict[str, str]:
    """Runs all missing runs. Returns the failures as `{name: reason}`; `{}` if there are none.

    Args:
        study: Study to run.
        places: Output folders.
        jobs: Number of parallel runs.
        threads: Number of threads per run.

    Raises:
        StudyError: If a run was made with other settings.
        RunningError: If the study is running already.
    """
    runs = plan(study, places.runs)
    with folder_lock(places.runs, "--runs-dir"):
        missing = [run for run in runs if known_record(run, places) is None]
        if not missing:
            sys.stdout.write(
                f"nothing to run: {places.results} has all results; use another --results-dir to repeat them\n"
            )
            return {}
        starts = {run.needs.name: run.needs for run in missing if run.needs is not None}
        begin = [run for run in starts.values() if not _has_ended(run)]
        first = {run.name for run in begin}
        todo = [*_in_order(begin, missing)]
        check_configs(todo, places.runs, {**os.environ, "OMP_NUM_THREADS": str(threads)})
        watch = Watch(todo, len(runs) - len(missing), jobs)
        by_name = {run.name: run for run in todo}

        def started(job: Job) -> None:
            prepare(by_name[job.name])
            watch.say(f"{job.name}: starts, log in {job.log}")

        def ended(job: Job) -> str:
            run = by_name[job.name]
            try:
                seconds = finish(run, places)
            except (OSError, ValueError) as error:
                return str(error)
            watch.say(f"{job.name}: finished after {clock(seconds)}")
            return ""

        listed = [_job(run, threads, run.needs.name if run.needs and run.needs.name in first else None) for run in todo]
        with watch:
            done = run_jobs(listed, jobs, started, ended, watch.show, lambda: watch.say(STOPPING))
        return done.failed


def known_record(run: StudyRun, places: Places) -> Record | None:
    """Loads the record of a run, or returns `None` if the run has not ended.

    Raises:
        StudyError: If the record belongs to a run with other settings.
    """
    path = places.record_path(run)
    if not path.is_file():
        return None
    record = read_record(path)
    now = json.loads(json.dumps(run.identity, default=str))
    if record.identity != now:
        raise StudyError(
            f"{path} is the record of a run with other settings ({_differences(record.identity, now)}); to repeat it, "
            f"delete it and the folder {run.folder}, or give the study another name"
        )
    return replace(record, arm=run.arm or "")  # an arm may be renamed if its file name stays the same


def _differences(then: object, now: object, name: str = "") -> str:
    if isinstance(then, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*then, *now])
        changed = [key for key in keys if then.get(key) != now.get(key)]
        return "; ".join(_differences(then.get(key), now.get(key), f"{name}.{key}".lstrip(".")) for key in changed)
    there, here = ("nothing" if value is None else repr(value) for value in (then, now))
    return f"{name.removeprefix('fields.')}: {there} there, {here} now"


def _in_order(begin: Sequence[StudyRun], missing: Sequence[StudyRun]) -> list[StudyRun]:
    """Places each warm start right before the first run that needs it."""
    order: dict[str, StudyRun] = {}
    names = {run.name for run in begin}
    for run in missing:
        if run.needs is not None and run.needs.name in names:
            order.setdefault(run.needs.name, run.needs)
        order[run.name] = run
    return list(order.values())


def _job(run: StudyRun, threads: int, after: str | None) -> Job:
    command = [sys.executable, str(run.recipe), "--config", str(run.folder / CONFIG)]
    return Job(run.name, command, run.folder / LOG, build_environment(run, threads), after)


def build_environment(run: StudyRun, threads: int) -> dict[str, str]:
    """Builds the environment of a run's process: modules beside the original config can be imported."""
    path = [str(run.config.parent.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(path)}


def prepare(run: StudyRun) -> None:
    """Writes a run's config, and adds the time of a killed attempt."""
    before = _seconds(run)
    config = run.folder / CONFIG
    write_text(config, yaml.safe_dump(dict(run.settings), sort_keys=False, allow_unicode=True))
    write_state(run.folder / STATE, {"seconds": before, "begun": config.stat().st_mtime})


def finish(run: StudyRun, places: Places) -> float:
    """Writes the record of a run that has just ended, and returns the run's seconds.

    Raises:
        ValueError: If a file in its folder is missing or corrupt.
    """
    seconds = _seconds(run, time.time())
    if run.arm is not None:
        write_record(places.record_path(run), collect(run, seconds))
    write_state(run.folder / STATE, {"seconds": seconds, "begun": None, "digest": run.digest})
    return seconds


def _has_ended(run: StudyRun) -> bool:
    state = run.folder / STATE
    return state.is_file() and read_state(state).get("digest") == run.digest


def _seconds(run: StudyRun, end: float | None = None) -> float:
    """Sums the time of all attempts. The last attempt ended at `end` or, if that is `None`, when its log ended."""
    file, log = run.folder / STATE, run.folder / LOG
    if not file.is_file():
        return 0.0
    state = read_state(file, "seconds", "begun")
    if state["begun"] is None or not log.is_file():
        return float(state["seconds"])
    end = log.stat().st_mtime if end is None else end
    return float(state["seconds"] + max(0.0, end - state["begun"]))
