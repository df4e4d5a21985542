"""Runs the missing runs of a study: recipes as programs, several at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from epo_trl.errors import InputError, changed_settings
from epo_trl.lab.study.config import Study
from epo_trl.lab.study.record import Record, collect, read_record, write_record
from epo_trl.lab.study.run_plan import StudyRun, plan
from epo_trl.runs.run_lock import folder_lock
from epo_trl.runs.state_file import read_state, write_atomically, write_state
from epo_trl.yaml_files import to_yaml

# A field of the records made before `tokens_per_pass`, which changed no more than rounding.
_DIVISION = "fields.turn_buckets: "
# In the folder of a run: its config, its output, and its state: identity, seconds of its attempts, the beginning of a
# running one as `since`, and the checksum of a finished one.
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


@dataclass
class Runner:
    """Runs recipes, each in its own process.

    Args:
        places: Output folders.
        jobs: Number of parallel runs.
        threads: Number of threads per run.
    """

    places: Places
    jobs: int
    threads: int
    _running: set[subprocess.Popen] = field(default_factory=set, init=False)
    _lock: Any = field(default_factory=Lock, init=False)
    _stopped: bool = field(default=False, init=False)

    def run_missing(self, study: Study) -> dict[str, str]:
        """Runs all missing runs, warm starts first. Returns the failures as `{name: reason}`; `{}` if there are none.

        A failed run cancels only the runs that need it. Ctrl-C or SIGTERM lets the runs save a checkpoint.

        Raises:
            InputError: If a run was made with other settings, or a recipe rejects a config.
            RunningError: If the study is running already.
            KeyboardInterrupt: After the runs have ended, if they were interrupted.
        """
        with folder_lock(self.places.runs, "--runs-dir"), folder_lock(self.places.results, "--results-dir"):
            missing = [run for run in plan(study, self.places.runs) if known_record(run, self.places) is None]
            if not missing:
                sys.stdout.write(
                    f"nothing to run: {self.places.results} has all results; use another --runs-dir and --results-dir "
                    "to repeat them\n"
                )
                return {}
            needed = {run.needs.name: run.needs for run in missing if run.needs is not None}
            warm_starts = [run for run in needed.values() if not _has_ended(run)]
            for run in [*warm_starts, *missing]:
                _need_same_settings(run)
            self._check_configs([*warm_starts, *missing])
            failed: dict[str, str] = {}
            count, ended = len(warm_starts) + len(missing), 0
            for batch in (warm_starts, missing):
                for run in batch:
                    if run.needs is not None and run.needs.name in failed:
                        failed[run.name] = f"{run.needs.name} has failed"
                with self._pool() as pool:
                    futures = {pool.submit(self._run, run): run.name for run in batch if run.name not in failed}
                    for future in as_completed(futures):
                        ended += 1
                        name, error = futures[future], future.result()
                        _say(f"{name}: {'failed' if error else 'finished'} ({ended} of {count})")
                        if error:
                            failed[name] = error
            return failed

    @contextlib.contextmanager
    def _pool(self) -> Iterator[ThreadPoolExecutor]:
        """Yields the threads that wait for the programs.

        Ctrl-C or SIGTERM in the block is passed on to the programs; a second one kills them.
        """
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        pool = ThreadPoolExecutor(self.jobs)
        try:
            yield pool
        except KeyboardInterrupt:
            _say(STOPPING)
            self._signal(signal.SIGTERM)
            with contextlib.suppress(KeyboardInterrupt):
                pool.shutdown(cancel_futures=True)
            self._signal(signal.SIGKILL)
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            signal.signal(signal.SIGTERM, before)

    def _signal(self, number: int) -> None:
        with self._lock:
            self._stopped = True
            for program in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, number)

    def _run(self, run: StudyRun) -> str:
        """Runs a recipe and writes its record. Returns `""`, or the reason of a failure."""
        config, log, state = run.folder / CONFIG, run.folder / LOG, run.folder / STATE
        try:
            earlier, begin = _seconds_of_attempts(run), time.monotonic()
            write_atomically(config, to_yaml(run.settings))
            _say(f"{run.name}: starts, log in {log}")
            with self._lock, open(log, "ab") as file:
                if self._stopped:
                    return "interrupted"
                write_state(state, {"identity": run.identity, "seconds": earlier, "since": time.time()})
                program = subprocess.Popen(
                    [sys.executable, str(run.recipe), "--config", str(config)], stdin=subprocess.DEVNULL, stdout=file,
                    stderr=file, env=_environment(run, self.threads), start_new_session=True,
                )  # fmt: skip
                self._running.add(program)
            status = program.wait()
            with self._lock:
                self._running.discard(program)
            seconds = earlier + time.monotonic() - begin
            write_state(state, {"identity": run.identity, "seconds": seconds})
            if status:
                return f"exit code {status}{_last_line(log)}, see {log}"
            if run.arm is not None:
                write_record(self.places.record_path(run), collect(run, seconds))
            write_state(state, {"identity": run.identity, "seconds": seconds, "digest": run.digest})
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def _check_configs(self, runs: Sequence[StudyRun]) -> None:
        """Lets each recipe validate the configs of its runs, before the first run starts.

        Raises:
            InputError: If a recipe rejects a config. The message names arm and field.
        """
        alike: dict[tuple[Path, Path], dict[str | None, StudyRun]] = {}  # runs with the same recipe and modules
        for run in runs:
            alike.setdefault((run.recipe, run.config.parent.resolve()), {}).setdefault(run.arm, run)  # one of the seeds
        with ThreadPoolExecutor() as pool:
            errors = "\n".join(pool.map(self._check, map(list, map(dict.values, alike.values()))))
        if lines := [line for line in errors.splitlines() if line]:
            raise InputError("; ".join(lines).replace(f"{self.places.runs / '_check'}{os.sep}", ""))

    def _check(self, runs: Sequence[StudyRun]) -> str:
        files = [self.places.runs / "_check" / f"{run.name}.yaml" for run in runs]
        for run, file in zip(runs, files, strict=True):
            write_atomically(file, to_yaml(run.settings))
        command = [sys.executable, str(runs[0].recipe), "--check", *map(str, files)]
        done = subprocess.run(command, env=_environment(runs[0], self.threads), capture_output=True, text=True)
        return done.stderr.strip()[-3000:] if done.returncode else ""


def known_record(run: StudyRun, places: Places) -> Record | None:
    """Loads the record of a run, or returns `None` if the run has not ended.

    Raises:
        InputError: If the record belongs to a run with other settings.
    """
    path = places.record_path(run)
    if not path.is_file():
        return None
    record = read_record(path)
    if _differences(record.identity, run):
        raise InputError(
            f"{path} is the record of a run with other settings ({_differences(record.identity, run)}); to repeat it, "
            f"delete it and the folder {run.folder}, or give the study another name"
        )
    return replace(record, arm=run.arm or "")  # an arm may be renamed if its file name stays the same


def _need_same_settings(run: StudyRun) -> None:
    """Raises `InputError` if the folder has results of other settings, some of which the recipe would accept: the
    record would state settings with which its first evaluations were not played."""
    state = run.folder / STATE
    has_results = any(run.folder.glob("**/checkpoint-*")) or any(run.folder.glob("evaluations/*"))
    if not state.is_file() or not has_results or run.settings.get("resume_with_changes"):
        return
    then = read_state(state).get("identity", run.identity)
    if _differences(then, run):
        raise InputError(
            f"{run.folder} was begun with other settings ({_differences(then, run)}); restore them, set "
            "resume_with_changes: true for its arm, delete the folder, or use another --runs-dir and --results-dir"
        )


def _differences(then: Mapping[str, Any], run: StudyRun) -> str:
    """Describes how an identity differs from that of a run. Fields that only divided the computation are left out."""
    lines = changed_settings(then, run.identity)
    return "; ".join(line.removeprefix("fields.") for line in lines if not line.startswith(_DIVISION))


def _seconds_of_attempts(run: StudyRun) -> float:
    """Returns the wall time of earlier attempts. One that outlived its study ended with the last line of its log."""
    state, log = run.folder / STATE, run.folder / LOG
    found = read_state(state, "seconds") if state.is_file() else {"seconds": 0.0}
    unseen = log.stat().st_mtime - found["since"] if "since" in found and log.is_file() else 0.0
    return float(found["seconds"] + max(0.0, unseen))


def _environment(run: StudyRun, threads: int) -> Mapping[str, str]:
    """Builds the environment of a process: modules beside the original config can be imported."""
    path = os.pathsep.join(filter(None, [str(run.config.parent.resolve()), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}


def _has_ended(run: StudyRun) -> bool:
    state = run.folder / STATE
    return state.is_file() and read_state(state).get("digest") == run.digest


def _last_line(log: Path) -> str:
    """Returns the last line of a log after a colon; `""` if it has none."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
