"""Runs the missing runs of a study."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from epo_trl.errors import InputError
from epo_trl.long_runs.folder_lock import folder_lock
from epo_trl.long_runs.state_file import read_state, write_atomically, write_state
from epo_trl.study.config import Study
from epo_trl.study.programs import Programs
from epo_trl.study.record import Record, collect, read_record, write_record
from epo_trl.study.run_plan import StudyRun, plan

# In the folder of a run: its config, its output, and the seconds of its attempts with the checksum of a finished one.
CONFIG, LOG, STATE = "config.yaml", "log.txt", "_study.json"
STOPPING = "stopping: the runs save a checkpoint; press Ctrl-C again to kill them"


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

    def recorded(self) -> set[str]:
        """Returns the names of all runs with a record, including those of other studies."""
        return {path.stem for path in (self.results / "runs").glob("*.json")}


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_missing(study: Study, places: Places, jobs: int, threads: int) -> dict[str, str]:
    """Runs all missing runs, warm starts first. Returns the failures as `{name: reason}`; `{}` if there are none.

    A failed run cancels only the runs that need it. Ctrl-C or SIGTERM lets the runs save a checkpoint.

    Args:
        study: Study to run.
        places: Output folders.
        jobs: Number of parallel runs.
        threads: Number of threads per run.

    Raises:
        InputError: If a run was made with other settings, or a recipe rejects a config.
        RunningError: If the study is running already.
        KeyboardInterrupt: After the runs have ended, if they were interrupted.
    """
    runs = plan(study, places.runs)
    with folder_lock(places.runs, "--runs-dir"):
        missing = [run for run in runs if known_record(run, places) is None]
        if not missing:
            sys.stdout.write(
                f"nothing to run: {places.results} has all results; use another --results-dir to repeat them\n"
            )
            return {}
        needed = {run.needs.name: run.needs for run in missing if run.needs is not None}
        warm_starts = [run for run in needed.values() if not _has_ended(run)]
        check_configs([*warm_starts, *missing], places.runs, threads)
        programs, failed = Programs(lambda: _say(STOPPING)), dict[str, str]()
        count, ended = len(warm_starts) + len(missing), 0
        for batch in (warm_starts, missing):
            for run in batch:
                if run.needs is not None and run.needs.name in failed:
                    failed[run.name] = f"{run.needs.name} has failed"
            ready = [run for run in batch if run.name not in failed]
            for run, error in programs.map(lambda run: _run(run, places, programs, threads), ready, jobs):
                ended += 1
                _say(f"{run.name}: {'failed' if error else 'finished'} ({ended} of {count})")
                if error:
                    failed[run.name] = error
        return failed


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def known_record(run: StudyRun, places: Places) -> Record | None:
    """Loads the record of a run, or returns `None` if the run has not ended.

    Raises:
        InputError: If the record belongs to a run with other settings.
    """
    path = places.record_path(run)
    if not path.is_file():
        return None
    record = read_record(path)
    now = json.loads(json.dumps(run.identity, default=str))
    if record.identity != now:
        raise InputError(
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


def check_configs(runs: Sequence[StudyRun], folder: Path, threads: int) -> None:
    """Lets each recipe validate the configs of its runs, before the first run starts.

    Args:
        runs: Runs that will be started.
        folder: Folder of the runs.
        threads: Number of threads per recipe.

    Raises:
        InputError: If a recipe rejects a config. The message names arm and field.
    """
    by_recipe: dict[Path, dict[str | None, StudyRun]] = {}
    for run in runs:
        by_recipe.setdefault(run.recipe, {}).setdefault(run.arm, run)  # seeds do not affect the check
    with ThreadPoolExecutor() as pool:
        errors = list(
            pool.map(lambda each: _check(list(each.values()), folder / "_check", threads), by_recipe.values())
        )
    if any(errors):
        lines = [line for error in errors for line in error.splitlines()]
        raise InputError("; ".join(lines).replace(f"{folder / '_check'}{os.sep}", ""))


def _check(runs: Sequence[StudyRun], folder: Path, threads: int) -> str:
    files = [folder / f"{run.name}.yaml" for run in runs]
    for run, file in zip(runs, files, strict=True):
        write_atomically(file, yaml.safe_dump(dict(run.settings), allow_unicode=True))
    command = [sys.executable, str(runs[0].recipe), "--check", *map(str, files)]
    done = subprocess.run(command, env=_environment(runs, threads), capture_output=True, text=True)
    return done.stderr.strip()[-3000:] if done.returncode else ""


def _environment(runs: Sequence[StudyRun], threads: int) -> Mapping[str, str]:
    """Builds the environment of a process: modules beside the original configs can be imported."""
    beside = dict.fromkeys(str(run.config.parent.resolve()) for run in runs)
    path = os.pathsep.join([*beside, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}


def _run(run: StudyRun, places: Places, programs: Programs, threads: int) -> str:
    """Runs a recipe and writes its record. Returns `""`, or the reason of a failure."""
    config, log, state = run.folder / CONFIG, run.folder / LOG, run.folder / STATE
    try:
        begin = time.monotonic() - (read_state(state, "seconds")["seconds"] if state.is_file() else 0.0)
        write_atomically(config, yaml.safe_dump(dict(run.settings), sort_keys=False, allow_unicode=True))
        _say(f"{run.name}: starts, log in {log}")
        command = [sys.executable, str(run.recipe), "--config", str(config)]
        error = programs.run(command, log, _environment([run], threads))
        seconds = time.monotonic() - begin
        write_state(state, {"seconds": seconds})
        if error:
            return f"{error}, see {log}"
        if run.arm is not None:
            write_record(places.record_path(run), collect(run, seconds))
        write_state(state, {"seconds": seconds, "digest": run.digest})
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _has_ended(run: StudyRun) -> bool:
    state = run.folder / STATE
    return state.is_file() and read_state(state).get("digest") == run.digest
