"""A study from its file to its report: what has ended stays, what has failed is said, kills change nothing."""

import json
import os
import re
import signal
import time
from pathlib import Path

import forked
import pytest
import yaml

from epo_trl.cli import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
RECIPE = Path(__file__).with_name("study_recipe.py")
ARMS = {"good": {"success": [0.3, 0.9, 0.9]}, "bad|one": {"success": [0.3, 0.2, 0.4]}}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Returns a function that writes a study and runs the command; its value is the exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("base.yaml").write_text("max_steps: 3\n")

    def run(*options, **changes):
        part = {"recipe": str(RECIPE), "config": "base.yaml"}
        content = {"warm_start": part, "train": part, "seeds": [1, 2], "window": 2, "smooth": 1, "arms": ARMS}
        Path("mine.yaml").write_text(yaml.safe_dump({**content, **changes}, sort_keys=False))
        return main(["study", "mine.yaml", *options])

    return run


def starts(folder="runs/mine"):
    return {path.parent.name: len(path.read_text()) for path in sorted(Path(folder).glob("*/starts.txt"))}


RECORDS = Path("results/mine/records.json")


def kept():
    return json.loads(RECORDS.read_text())


ALL = {"good-seed1": 1, "good-seed2": 1, "bad-one-seed1": 1, "bad-one-seed2": 1, "warm-start-seed1": 1,
       "warm-start-seed2": 1}  # fmt: skip


def test_every_run_is_made_once_and_the_report_says_what_came_out(study, capsys):
    assert study() == 0 and starts() == ALL
    out, err = capsys.readouterr()
    assert "wrote results/mine/report.md" in out and "good-seed2: finished (" in err
    report = Path("results/mine/report.md").read_text()
    # 0.9 + 0.01 and 0.9 + 0.02; t of 1 degree is 12.7: far beyond 100 on both sides but for the ends of a share
    assert "| good | 2 | 91.5 ± 0.7 (85.1 to 97.9) | 2 (34 to 100 %) | 0 | 2 (2) |" in report
    assert "| bad\\|one | 2 | 31.5 ± 0.7 (25.1 to 37.9) | 0 (0 to 66 %) | 2 | – |" in report
    assert "| bad\\|one | 2 | -60.0 (-60.0 to -60.0) | 2 | 0 / 0 / 2 / 0 | 0.333 |" in report
    assert "| good | 91.0 **solved** | 92.0 **solved** |" in report and "Missing" not in report
    assert study() == 0 and starts() == ALL  # nothing is run again
    assert "nothing to run: results/mine has all results" in capsys.readouterr().err
    record = kept()["good-seed1"]
    assert record["curves"] == {"env/success_rate": [0.31, 0.91, 0.91], "entropy/all_tokens": [1, 1, 1]}
    assert record["identity"]["fields"] == {"max_steps": 3, "success": [0.3, 0.9, 0.9]} and record["seconds"] >= 0
    assert Path("results/mine/report.md").read_text() == report


def test_the_results_alone_give_the_same_report(study, tmp_path):
    assert study() == 0
    before = {path.name: path.read_bytes() for path in Path("results/mine").iterdir()}
    (tmp_path / "runs").rename(tmp_path / "gone")
    for name in before.keys() - {RECORDS.name}:
        (tmp_path / "results" / "mine" / name).unlink()
    assert study("--report-only") == 0
    assert {path.name: path.read_bytes() for path in Path("results/mine").iterdir()} == before
    assert not Path("runs").exists()
    assert study() == 0 and not starts()
    assert study("--results-dir", "anew", "--arms", "good") == 0 and set(starts()) == {
        "good-seed1", "good-seed2", "warm-start-seed1", "warm-start-seed2"}  # fmt: skip


def test_a_run_that_fails_stops_no_other_and_is_tried_again(study, capsys):
    broken = {**ARMS, "broken": {"fails": "no\x1b luck"}}
    assert study(arms=broken) == 1
    err = capsys.readouterr().err
    assert "failed: broken-seed1: exit code 1: no\\x1b luck, see runs/mine/broken-seed1/log.txt" in err
    assert starts() == {**ALL, "broken-seed1": 1, "broken-seed2": 1}
    report = Path("results/mine/report.md").read_text()
    assert "- broken: seeds 1 2\n" in report and "| good | 2 | 91.5" in report
    assert study(arms={**ARMS, "broken": {"success": [0.5] * 3}}) == 0
    assert starts() == {**ALL, "broken-seed1": 2, "broken-seed2": 2}
    warm = {"recipe": str(RECIPE), "config": "base.yaml", "fails": "no luck"}
    assert study("--runs-dir", "runs/other", "--results-dir", "other", warm_start=warm) == 1
    assert "failed: good-seed1: warm-start-seed1 has failed" in capsys.readouterr().err
    assert set(starts("runs/other")) == {"warm-start-seed1", "warm-start-seed2"}


def test_other_settings_are_refused_before_anything_runs_and_new_arms_and_words_are_not(study, capsys):
    assert study() == 0
    other = {"success": [0.3, 0.9, 0.8]}
    assert study("--arms", "new", arms={**ARMS, "good": other, "new": other}) == 1
    err = capsys.readouterr().err
    assert "records.json has the record of good-seed1 with other settings" in err
    assert "(success: [0.3, 0.9, 0.9] there, [0.3, 0.9, 0.8] now)" in err
    assert "delete that entry and the folder runs/mine/good-seed1" in err and starts() == ALL
    arms = {"GOOD": ARMS["good"], "bad|one": ARMS["bad|one"], "new": {"success": [0.5] * 3}}
    assert study(arms=arms, question="Why?", window=1, baseline="new") == 0
    assert starts() == {**ALL, "new-seed1": 1, "new-seed2": 1}
    assert "| GOOD | 2 |" in Path("results/mine/report.md").read_text()


def test_a_field_that_a_recipe_does_not_take_is_said_before_anything_runs(study, capsys):
    assert study(arms={**ARMS, "typo": {"sucess": [1]}}) == 1
    assert capsys.readouterr().err == "epo-trl: error: typo-seed1.yaml: sucess: unknown\n"
    assert starts() == {}


def test_some_arms_and_seeds_only(study, capsys):
    assert study("--arms", "good", "--seeds", "1", "5") == 0
    assert set(starts()) == {"good-seed1", "good-seed5", "warm-start-seed1", "warm-start-seed5"}
    report = Path("results/mine/report.md").read_text()
    assert "| arm | seed 1 | seed 2 | seed 5 |" in report and "- good: seeds 2\n- bad\\|one: seeds 1 " in report
    assert "not in the report" not in capsys.readouterr().out
    assert study("--report-only") == 0
    assert "not in the report, since neither mine.yaml nor --seeds names them: good-seed5\n" in capsys.readouterr().out


def is_in(link, folder):
    try:
        return link.readlink() == folder
    except OSError:  # the process has ended
        return False


@pytest.mark.parametrize(("jobs", "order"), [(1, ["starts", "finished"] * 2), (2, ["starts"] * 2 + ["finished"] * 2)])
def test_runs_are_parallel_but_no_more_than_asked(study, jobs, order, capsys):
    arms = {name: {"seconds": 0.3, "success": [0.5] * 3} for name in "ab"}
    assert study("--jobs", str(jobs), seeds=[1], warm_start=None, arms=arms) == 0
    assert re.findall("starts|finished", capsys.readouterr().err) == order


def test_after_an_interrupt_no_run_is_left_and_the_same_command_ends_with_the_same_report(study, tmp_path):
    assert study("--runs-dir", "straight/runs", "--results-dir", "straight/results") == 0
    command = ["-m", "epo_trl.cli", "study", "mine.yaml", "--jobs", "1"]
    kills = 0
    for _ in range(20):
        process = forked.start(command, cwd=tmp_path, log=tmp_path / "log.txt")
        begun = len(list(Path("runs").glob("mine/*/config.yaml")))
        end = time.monotonic() + 60
        while process.poll() is None and len(list(Path("runs").glob("mine/*/config.yaml"))) < min(begun + 2, 6):
            assert time.monotonic() < end
            time.sleep(0.005)
        if process.poll() is None and kills < 3:
            os.kill(process.pid, (signal.SIGTERM, signal.SIGINT, signal.SIGINT)[kills])
            kills += 1
        ended = process.wait() == 0
        here = [link.parent.name for link in Path("/proc").glob("[0-9]*/cwd") if is_in(link, tmp_path)]
        assert here == [str(os.getpid())]
        if ended:
            break
    assert kills == 3 and ended
    for name in ("report.md", "curves.png"):
        assert Path("results/mine", name).read_bytes() == Path("straight/results", name).read_bytes()
    others = json.loads(Path("straight/results/records.json").read_text())
    assert [one["identity"] for one in kept().values()] == [one["identity"] for one in others.values()]
