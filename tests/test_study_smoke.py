"""The smallest study with the real recipes, and the results in the repository."""

from pathlib import Path
from types import SimpleNamespace

import forked
import pytest

from epo_trl.cli import main
from epo_trl.lab.study import figure, runner
from epo_trl.lab.study.config import load_study, plan
from epo_trl.lab.study.record import RECORDS, read_records
from epo_trl.lab.study.runner import LOG, known_records
from epo_trl.lab.study.study_report import write_report

ROOT = Path(__file__).parents[1]
SMOKE = Path("studies/smoke.yaml")


@pytest.mark.slow
def test_a_study_runs_from_its_warm_start_to_its_report_without_a_warning(tmp_path, monkeypatch):
    """With one of its arms; several, and what a kill changes: tests/test_study.py with a recipe that does nothing.

    All of it in forks: tests/test_ctrl_c.py reads what a program says while it is imported.
    """
    monkeypatch.chdir(ROOT)
    for name, value in {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("PYTHONWARNINGS", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)

    def check(words, env, **_):
        done = forked.run(words[1:], cwd=ROOT, log=tmp_path / "check.txt", **env)
        return SimpleNamespace(returncode=done.returncode, stderr=done.stdout)

    def start(words, stdout, env, **_):
        return forked.start(words[1:], cwd=ROOT, log=Path(stdout.name), **env)

    monkeypatch.setattr(runner.subprocess, "run", check)
    monkeypatch.setattr(runner.subprocess, "Popen", start)
    runs, results = tmp_path / "runs", tmp_path / "results"
    text = SMOKE.read_text().replace("max_steps: 12", "max_steps: 4").replace("cpu.yaml}", "cpu.yaml, max_steps: 15}")
    assert "max_steps: 4}" in text and "max_steps: 15}" in text
    (small := tmp_path / "smoke.yaml").write_text(text)
    places = ["--runs-dir", str(runs), "--results-dir", str(results)]
    assert main(["study", str(small), "--seeds", "0", "--arms", "epo", *places]) == 0
    assert read_records(results / RECORDS).keys() == {"epo-seed0"}
    assert "| epo | 1 | " in (results / "report.md").read_text()
    assert (results / "curves.png").stat().st_size > 3_000
    logs = {log.parent.name: log.read_text() for log in runs.rglob(LOG)}
    assert len(logs) == 2 and all("'loss'" in said or "step " in said for said in logs.values())
    assert [line for said in logs.values() for line in said.splitlines() if "warn" in line.lower()] == []


@pytest.mark.slow
def test_the_committed_results_give_the_committed_report(tmp_path, monkeypatch):
    """Of every study that can still run: whoever changes how a report is made, makes them again with --report-only."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(figure, "draw", lambda *_: None)  # only the text is compared
    reports = sorted(Path("results").glob("*/report.md"))
    reports = [file for file in reports if Path("studies", f"{file.parent.name}.yaml").is_file()]
    assert Path("results/smoke/report.md") in reports
    for file in reports:
        study = load_study(Path("studies", f"{file.parent.name}.yaml"))
        records = known_records(plan(study, Path("runs", study.name)), file.parent)
        write_report(study, [*records.values()], tmp_path / study.name)
        assert (tmp_path / study.name / "report.md").read_text() == file.read_text(), f"{file} is not fresh"
