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
from epo_trl.lab.study.config import StudyRun
from epo_trl.lab.study.record import RECORDS, Record, collect, read_records, write_records
from epo_trl.runs.run_lock import folder_lock
from epo_trl.runs.state_file import read_state, write_atomically, write_state
from epo_trl.yaml_files import to_yaml

# In the folder of a run: its config, its output, and its state: identity, seconds of its attempts, whether it is done.
CONFIG, LOG, STATE = "config.yaml", "log.txt", "_study.json"
STOPPING = "stopping: the runs save a checkpoint; press Ctrl-C again to kill them"


@dataclass
class Runner:
    """Runs recipes, each in its own process."""

    runs: Path  # folder of the runs, each in its own subfolder
    results: Path  # folder of the report and the records
    jobs: int  # number of parallel runs
    threads: int  # number of threads per run
    _running: set[subprocess.Popen] = field(default_factory=set, init=False)
    _lock: Any = field(default_factory=Lock, init=False)
    _stopped: bool = field(default=False, init=False)

    def run_missing(self, planned: Sequence[StudyRun]) -> dict[str, str]:
        """Runs those that have no record, warm starts first. Returns the failures as `{name: reason}`.

        A failed run cancels only the runs that need it. Ctrl-C or SIGTERM lets the runs save a checkpoint.

        Raises:
            InputError: If a run was made with other settings, or a recipe rejects a config.
            RunningError: If the study is running already.
            KeyboardInterrupt: After the runs have ended, if they were interrupted.
        """
        with folder_lock(self.runs, "--runs-dir"), folder_lock(self.results, "--results-dir"):
            known = known_records(planned, self.results)
            missing = [run for run in planned if run.name not in known]
            if not missing:
                _say(f"nothing to run: {self.results} has all results; use other folders to repeat them")
                return {}
            needed = {run.needs.name: run.needs for run in missing if run.needs is not None}
            warm_starts = [run for run in needed.values() if not _is_done(run)]
            for run in [*warm_starts, *missing]:
                _need_same_settings(run)
            self._check_configs([*warm_starts, *missing])
            failed: dict[str, str] = {}
            ended, total = 0, len(warm_starts) + len(missing)
            for batch in (warm_starts, missing):
                for run in batch:
                    if run.needs is not None and run.needs.name in failed:
                        failed[run.name] = f"{run.needs.name} has failed"
                with self._pool() as pool:
                    futures = {pool.submit(self._run, run): run.name for run in batch if run.name not in failed}
                    for future in as_completed(futures):
                        name, error, ended = futures[future], future.result(), ended + 1
                        _say(f"{name}: {'failed' if error else 'finished'} ({ended} of {total})")
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
        """Runs a recipe and keeps its record. Returns `""`, or the reason of a failure."""
        config, log, state = run.folder / CONFIG, run.folder / LOG, run.folder / STATE
        try:
            earlier = read_state(state, "seconds")["seconds"] if state.is_file() else 0.0
            begin = time.monotonic()
            write_atomically(config, to_yaml(run.settings))
            write_state(state, {"identity": run.identity, "seconds": earlier, "done": False})
            _say(f"{run.name}: starts, log in {log}")
            with self._lock, open(log, "ab") as file:
                if self._stopped:
                    return "interrupted"
                program = subprocess.Popen(
                    [sys.executable, str(run.recipe), "--config", str(config)], stdin=subprocess.DEVNULL, stdout=file,
                    stderr=file, env=_environment(run, self.threads), start_new_session=True,
                )  # fmt: skip
                self._running.add(program)
            status = program.wait()
            with self._lock:
                self._running.discard(program)
            seconds = earlier + time.monotonic() - begin
            write_state(state, {"identity": run.identity, "seconds": seconds, "done": not status})
            if status:
                return f"exit code {status}{_last_line(log)}, see {log}"
            if run.arm is not None:
                record = collect(run, seconds)
                with self._lock:
                    records = read_records(self.results / RECORDS)
                    write_records(self.results / RECORDS, {**records, run.name: record})
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

        def check(arms: Mapping[str | None, StudyRun]) -> str:
            files = {self.runs / "_check" / f"{run.name}.yaml": run for run in arms.values()}
            for file, run in files.items():
                write_atomically(file, to_yaml(run.settings))
            command = [sys.executable, str(run.recipe), "--check", *map(str, files)]
            done = subprocess.run(command, env=_environment(run, self.threads), capture_output=True, text=True)
            return done.stderr.strip()[-3000:] if done.returncode else ""

        with ThreadPoolExecutor() as pool:
            errors = "\n".join(pool.map(check, alike.values()))
        if lines := [line for line in errors.splitlines() if line]:
            raise InputError("; ".join(lines).replace(f"{self.runs / '_check'}{os.sep}", ""))


def known_records(planned: Sequence[StudyRun], results: Path) -> dict[str, Record]:
    """Loads the records of these runs.

    Raises:
        InputError: If a record belongs to a run with other settings.
    """
    records = read_records(results / RECORDS)
    known = [run for run in planned if run.name in records]
    for run in known:
        if differences := _differences(records[run.name].identity, run):
            raise InputError(
                f"{results / RECORDS} has the record of {run.name} with other settings ({differences}); to repeat the "
                f"run, delete that entry and the folder {run.folder}, or give the study another name"
            )
    # An arm may be renamed if its folder stays the same.
    return {run.name: replace(records[run.name], arm=run.arm or "") for run in known}


def _need_same_settings(run: StudyRun) -> None:
    """Raises `InputError` if the folder has results of other settings, some of which the recipe would accept: the
    record would state settings with which its first evaluations were not played."""
    state = run.folder / STATE
    has_results = any(run.folder.glob("**/checkpoint-*")) or any(run.folder.glob("evaluations/*"))
    if not state.is_file() or not has_results or run.settings.get("resume_with_changes"):
        return
    if differences := _differences(read_state(state, "identity")["identity"], run):
        raise InputError(
            f"{run.folder} was begun with other settings ({differences}); restore them, set resume_with_changes: true "
            "for its arm, delete the folder, or use another --runs-dir and --results-dir"
        )


def _differences(then: Mapping[str, Any], run: StudyRun) -> str:
    return "; ".join(line.removeprefix("fields.") for line in changed_settings(then, run.identity))


def _environment(run: StudyRun, threads: int) -> Mapping[str, str]:
    """Builds the environment of a process: modules beside the original config can be imported."""
    path = os.pathsep.join(filter(None, [str(run.config.parent.resolve()), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}


def _is_done(run: StudyRun) -> bool:
    state = read_state(run.folder / STATE) if (run.folder / STATE).is_file() else {}
    return bool(state.get("done")) and not _differences(state["identity"], run)


def _last_line(log: Path) -> str:
    """Returns the last line of a log after a colon; `""` if it has none."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
