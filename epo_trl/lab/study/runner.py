"""Runs the missing runs of a study: recipes as programs, several at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from epo_trl.errors import InputError, changed_settings
from epo_trl.lab.study.config import StudyRun
from epo_trl.lab.study.record import RECORDS, Record, collect, read_records, write_records
from epo_trl.runs.files import read_state, write_atomically, write_state
from epo_trl.runs.run_lock import folder_lock
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

    def run_missing(self, planned: Sequence[StudyRun]) -> dict[str, str]:
        """Runs those that have no record, warm starts first. Returns the failures as `{name: reason}`.

        A failed run cancels only the runs that need it. Ctrl-C or SIGTERM lets the runs save a checkpoint.

        Raises:
            InputError: If a record was made with other settings, or a recipe rejects a config.
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
            self._check_configs([*warm_starts, *missing])
            failed = self._run(warm_starts)
            failed |= {
                run.name: f"{run.needs.name} has failed"
                for run in missing
                if run.needs is not None and run.needs.name in failed
            }
            return failed | self._run([run for run in missing if run.name not in failed])

    def _run(self, runs: Sequence[StudyRun]) -> dict[str, str]:
        """Runs recipes, `jobs` at a time. Ctrl-C and SIGTERM are passed on to them; a second signal kills them."""
        waiting, running, failed = list(runs), dict[subprocess.Popen, StudyRun](), dict[str, str]()
        stops: list[int] = []  # a handler that raised could lose a program that has just started
        before = {
            number: signal.signal(number, lambda *_: stops.append(1)) for number in (signal.SIGINT, signal.SIGTERM)
        }
        passed_on = 0
        try:
            while running or (waiting and not stops):
                while waiting and len(running) < self.jobs and not stops:
                    run = waiting.pop(0)
                    running[self._start(run)] = run
                for program in [each for each in running if each.poll() is not None]:
                    run = running.pop(program)
                    error = self._end(run, program.returncode)
                    failed |= {run.name: error} if error else {}
                    ended = len(runs) - len(waiting) - len(running)
                    _say(f"{run.name}: {'failed' if error else 'finished'} ({ended} of {len(runs)})")
                if len(stops) > passed_on:
                    passed_on = len(stops)
                    _say(STOPPING)
                    for program in running:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(program.pid, signal.SIGTERM if passed_on == 1 else signal.SIGKILL)
                time.sleep(0.05)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if stops:
            raise KeyboardInterrupt
        return failed

    def _start(self, run: StudyRun) -> subprocess.Popen:
        config, log, state = run.folder / CONFIG, run.folder / LOG, run.folder / STATE
        earlier = read_state(state, "seconds")["seconds"] if state.is_file() else 0.0
        write_atomically(config, to_yaml(run.settings))
        write_state(state, {"identity": run.identity, "seconds": earlier, "begun": time.time(), "done": False})
        _say(f"{run.name}: starts, log in {log}")
        with open(log, "ab") as file:
            return subprocess.Popen(
                [sys.executable, str(run.recipe), "--config", str(config)], stdin=subprocess.DEVNULL, stdout=file,
                stderr=file, env=_environment(run.config.parent, self.threads), start_new_session=True,
            )  # fmt: skip

    def _end(self, run: StudyRun, status: int) -> str:
        """Keeps the record of a run whose recipe has ended. Returns `""`, or the reason of a failure."""
        log, state = run.folder / LOG, run.folder / STATE
        begun = read_state(state, "seconds", "begun")
        seconds = begun["seconds"] + time.time() - begun["begun"]
        write_state(state, {"identity": run.identity, "seconds": seconds, "done": not status})
        if status:
            lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
            return f"exit code {status}: {last[:300]}, see {log}"
        try:
            if run.arm is not None:
                records = {**read_records(self.results / RECORDS), run.name: collect(run, seconds)}
                write_records(self.results / RECORDS, records)
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def _check_configs(self, runs: Sequence[StudyRun]) -> None:
        """Lets each recipe validate the configs of its runs, before the first run starts.

        An `InputError` names the arm and the field of each config that a recipe rejects.
        """
        alike: dict[tuple[Path, Path], dict[str | None, StudyRun]] = {}  # runs with the same recipe and modules
        for run in runs:
            alike.setdefault((run.recipe, run.config.parent), {}).setdefault(run.arm, run)  # one of the seeds
        folder, errors = self.runs / "_check", ""
        for (recipe, modules), arms in alike.items():
            files = {str(folder / f"{run.name}.yaml"): run for run in arms.values()}
            for file, run in files.items():
                write_atomically(file, to_yaml(run.settings))
            command = [sys.executable, str(recipe), "--check", *files]
            done = subprocess.run(command, env=_environment(modules, self.threads), capture_output=True, text=True)
            errors += done.stderr.strip()[-3000:] + "\n" if done.returncode else ""
        if lines := errors.splitlines():
            raise InputError("; ".join(filter(None, lines)).replace(f"{folder}{os.sep}", ""))


def known_records(planned: Sequence[StudyRun], results: Path) -> dict[str, Record]:
    """Loads the records of these runs; `InputError` if one belongs to a run with other settings."""
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


def _differences(then: Mapping[str, Any], run: StudyRun) -> str:
    return "; ".join(line.removeprefix("fields.") for line in changed_settings(then, run.identity))


def _environment(modules: Path, threads: int) -> Mapping[str, str]:
    """Builds the environment of a process: modules beside the original config can be imported."""
    path = os.pathsep.join(filter(None, [str(modules.resolve()), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}


def _is_done(run: StudyRun) -> bool:
    state = read_state(run.folder / STATE) if (run.folder / STATE).is_file() else {}
    return bool(state.get("done")) and not _differences(state["identity"], run)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
