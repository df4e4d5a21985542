"""The smallest study with the real recipes, and the results in the repository."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from epo_trl.study.config import load_study
from epo_trl.study.run_plan import plan
from epo_trl.study.runner import Places, known_record
from epo_trl.study.study_report import write_report

ROOT = Path(__file__).parents[1]
SMOKE = Path("studies/smoke.yaml")


@pytest.mark.slow
def test_a_study_runs_from_its_warm_starts_to_its_report(tmp_path):
    """That a kill changes nothing: tests/test_study.py for the study, tests/test_resume.py for its runs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "epo_trl.cli", "study", str(SMOKE), "--seeds", "0"]
    places = ["--runs-dir", str(tmp_path / "runs"), "--results-dir", str(tmp_path / "results")]
    subprocess.run([*command, *places], cwd=ROOT, env=environment, check=True, timeout=600)
    assert {path.stem for path in (tmp_path / "results" / "runs").iterdir()} == {"grpo-seed0", "epo-seed0"}
    assert "| grpo | 1 | " in (tmp_path / "results" / "report.md").read_text()
    assert (tmp_path / "results" / "curves.png").stat().st_size > 10_000


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
