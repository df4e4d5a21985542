"""The smallest study with the real recipes: killed in the middle, it ends with the report of one that was not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from epo_trl.study.config import load_study
from epo_trl.study.plan import plan
from epo_trl.study.report import write_report
from epo_trl.study.runner import Places, known_record

ROOT = Path(__file__).parents[1]
SMOKE = Path("studies/smoke.yaml")


def started(folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "epo_trl.cli", "study", str(SMOKE), "--seeds", "0"]
    places = ["--runs-dir", str(folder / "runs"), "--results-dir", str(folder / "results")]
    return subprocess.Popen([*command, *places], cwd=ROOT, env=environment)


def in_the_middle_of_rl(folder):
    """Whether a run has a checkpoint, or is about to."""
    return any("12/12" not in log.read_text() and " 8/12 [" in log.read_text() for log in folder.glob("runs/*/log.txt"))


@pytest.mark.slow
def test_a_study_that_was_killed_ends_with_the_same_report(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert started(straight).wait(600) == 0
    process, end = started(killed), time.monotonic() + 300
    while not in_the_middle_of_rl(killed):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(killed.glob("results/runs/grpo*")) or not list(killed.glob("results/runs/epo*"))
    assert started(killed).wait(600) == 0
    for name in ("report.md", "curves.png"):
        assert (straight / "results" / name).read_bytes() == (killed / "results" / name).read_bytes()


def test_the_committed_results_give_the_committed_report(tmp_path, monkeypatch):
    """Of every study: whoever changes how a report is made, makes them again with --report-only."""
    monkeypatch.chdir(ROOT)
    reports = sorted(Path("results").glob("*/report.md"))
    assert Path("results/smoke/report.md") in reports
    for file in reports:
        study = load_study(Path("studies", f"{file.parent.name}.yaml"))
        places = Places(Path("runs") / study.name, file.parent)
        records = [one for run in plan(study, places.runs) if (one := known_record(run, places)) is not None]
        write_report(study, records, tmp_path / study.name)
        assert (tmp_path / study.name / "report.md").read_text() == file.read_text(), f"{file} is not fresh"
