"""The record of a run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from epo_trl.errors import InputError
from epo_trl.lab.study.config import Arm, Part, Study
from epo_trl.lab.study.outcomes import judge
from epo_trl.lab.study.record import (
    COMPLETE,
    POINTS,
    EvaluationRecord,
    Record,
    collect,
    read_record,
    rl_points,
    thin,
    write_record,
)
from epo_trl.lab.study.run_plan import StudyRun


def run_of(folder, arm="a", name="a-seed1", **settings):
    return StudyRun(arm, 1, folder / name, Path("r.py"), Path("c.yaml"), settings, {"seed": 1})


def test_optimizer_steps_become_rl_steps_and_what_one_logs_twice_is_averaged():
    history = [
        {"step": 1, "env/success_rate": 0.5, "entropy": 1.0, "time/all": 9, "epoch": 0.1},
        {"step": 2, "entropy": 2.0},
        {"step": 3, "env/success_rate": 0.25, "entropy": float("nan"), "eval_iid/success_rate": 1.0},
        {"step": 4, "entropy": 3.0, "flag": True, "text": "x"},
    ]
    assert rl_points(history, 2.0).to_dict("index") == {
        1: {"env/success_rate": 0.5, "entropy": 1.5}, 2: {"env/success_rate": 0.25, "entropy": 3.0},
    }  # fmt: skip
    # A log of two RL steps: an optimizer step that uses up two batches.
    both = rl_points(history, 0.5)
    assert list(both.index) == [*range(1, 9)] and both["entropy"].dropna().tolist() == [1, 1, 2, 2, 3, 3]


def test_thinning_keeps_means_and_the_last_step_of_each():
    curves = pd.DataFrame({"x": [1.0, 3.0, None, 5.0, 9.0], "y": [None, None, 1.0, 2.0, 3.0]}, [1, 2, 3, 4, 5])
    thinned = pd.DataFrame({"x": [2.0, 5.0, 9.0], "y": [None, 1.5, 3.0]}, [2, 4, 5])
    pd.testing.assert_frame_equal(thin(curves, 3), thinned)
    for points in (5, 99):
        pd.testing.assert_frame_equal(thin(curves, points), curves)
    assert list(thin(curves[[]], 3).index) == [2, 4, 5] and thin(curves[:0], 3).empty


def trained(folder, steps=400, metrics=50, updates=1, evaluations=()):
    """Leaves what a trainer leaves; the last of two checkpoints has the whole log."""
    names = [*COMPLETE, *(f"other/metric_{i}" for i in range(metrics))]
    log = [{"step": step, **{name: 0.123456 * step % 1 for name in names}} for step in range(1, steps * updates + 1)]
    for part in (log[: steps // 2], log):
        checkpoint = folder / f"checkpoint-{len(part)}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": part}))
    settings = {"steps_per_generation": 8, "num_iterations": updates, "gradient_accumulation_steps": 8}
    (folder / "_finished.json").write_text(json.dumps({"settings": settings}))
    (folder / "evaluations").mkdir()
    for step, report in evaluations:
        (folder / "evaluations" / f"step_{step:06d}.json").write_text(json.dumps({"step": step, "reports": [report]}))


REPORT = {
    "protocol": {"name": "tiny"}, "suite": "s", "split": "iid", "episodes": 400, "wins": 100, "turns": 4000,
    "types": {"look": {"episodes": 300, "wins": 90, "success_rate": 0.3}, "cool": {"episodes": 100, "wins": 10}},
    "invalid_turns": 5, "wait_turns": 0, "score_sum": None, "stop_reasons": {"won": 100, "turn_limit": 300},
    "seconds": 12.5,
}  # fmt: skip


def test_a_long_run_is_kept_in_less_than_30_kilobytes_and_read_back_as_it_was(tmp_path):
    run = run_of(tmp_path)
    trained(run.folder, updates=4, evaluations=[(0, REPORT), (1600, REPORT)])
    record = collect(run, 61.26)
    write_record(tmp_path / "a.json", record)
    assert (tmp_path / "a.json").stat().st_size < 30_000
    assert read_record(tmp_path / "a.json") == record
    assert record.seconds == 61.3 and record.curves["rl_step"] == list(range(1, 401))
    # RL step 1 is optimizer steps 1 to 4: 0.123456 * (1 + 2 + 3 + 4) / 4 = 0.30864
    assert record.curves["env/success_rate"][0] == 0.30864 and record.curves["entropy/all_tokens"][0] == 0.309
    assert len(record.thinned["other/metric_1"]) <= POINTS
    assert record.thinned["rl_step"][:2] == [14, 28]
    assert [one.rl_step for one in record.evaluations] == [0, 400]
    longer = run_of(tmp_path, name="longer-seed1")
    trained(longer.folder, steps=2345, metrics=0, evaluations=[(2345, REPORT)])
    found = collect(longer, 1.0)
    assert found.curves["rl_step"][-1] == found.evaluations[0].rl_step == 2345
    assert found.thinned["rl_step"][-2:] == [2291, 2345]
    counts = {name: REPORT[name] for name in ("turns", "invalid_turns", "wait_turns", "score_sum", "stop_reasons")}
    assert record.evaluations[0] == EvaluationRecord(
        0, "iid", "tiny", 100, 400, {"look": [90, 300], "cool": [10, 100]}, counts
    )
    assert record.evaluations[0].rate == 0.25


def test_evaluations_are_in_the_order_of_their_steps_and_copies_of_their_files_are_none(tmp_path):
    run = run_of(tmp_path)
    trained(run.folder, steps=4, metrics=0, evaluations=[(step, REPORT) for step in (1_000_000, 0, 999_000)])
    for copy in ("step_best", "step_000000_before", "step_000000 (copy)"):
        (run.folder / "evaluations" / f"{copy}.json").write_text(json.dumps({"step": 3, "reports": [REPORT]}))
    assert [one.rl_step for one in collect(run, 1.0).evaluations] == [0, 999_000, 1_000_000]


@pytest.mark.parametrize(("wins", "episodes"), [(0, 0), (401, 400)])
def test_an_evaluation_with_impossible_counts_is_refused_with_its_file(tmp_path, wins, episodes):
    counts = {"wins": wins, "episodes": episodes}
    for place, report in (("total", {**REPORT, **counts}), ("types", {**REPORT, "types": {"look": counts}})):
        run = run_of(tmp_path / place)
        trained(run.folder, steps=2, metrics=0, evaluations=[(2, report)])
        with pytest.raises(InputError, match=r"step_000002\.json is not an evaluation .*: expected .*, got \d"):
            collect(run, 1.0)


def test_an_evaluation_knows_the_settings_of_its_protocol_apart_from_its_name(tmp_path):
    plain = {"name": "tiny", "description": "x", "temperature": 1.0, "env_options": {"a": 1, "b": 2}}
    same = {"env_options": {"b": 2, "a": 1}, "temperature": 1.0, "name": "other", "description": "y"}
    found = []
    for protocol in (plain, same, {**plain, "temperature": 0.0}):
        run = run_of(tmp_path / str(len(found)))
        trained(run.folder, steps=2, metrics=0, evaluations=[(2, {**REPORT, "protocol": protocol})])
        write_record(tmp_path / "a.json", collect(run, 1.0))
        found.append(read_record(tmp_path / "a.json").evaluations[0].rules)
    assert found[0] == found[1] != found[2] and all(found)


def test_a_record_knows_the_weights_of_the_warm_start_wherever_they_lie(tmp_path):
    found = []
    for place, weights in (("here", b"x"), ("there", b"x"), ("other", b"y")):
        start = run_of(tmp_path / place, None, "warm-start-seed1")
        start.folder.mkdir(parents=True)
        (start.folder / "model.safetensors").write_bytes(weights)
        run = replace(run_of(tmp_path / place), needs=start)
        trained(run.folder, steps=2)
        found.append(collect(run, 1.0).begins_with)
    assert found[0] == found[1] != found[2] and str(tmp_path) not in "".join(found)


def test_without_a_warm_start_a_record_knows_the_model_of_the_config(tmp_path):
    found = []
    for given in ({"model_name_or_path": "hub/x"}, {"model_name_or_path": "hub/x", "model_revision": "v2"}, {}):
        run = run_of(tmp_path / str(len(found)), **given)
        trained(run.folder, steps=2)
        found.append(collect(run, 1.0).begins_with)
    assert found == ["hub/x", "hub/x@v2", ""]


@pytest.mark.parametrize(("wins", "episodes"), [((13, 12, 13, 13, 13), 16), ((9, 10, 10, 9, 10), 12)])
def test_a_run_that_reaches_a_level_exactly_does_so_by_its_record(tmp_path, wins, episodes):
    """64 of 80 and 48 of 60 episodes."""
    run = run_of(tmp_path)
    trained(run.folder, steps=len(wins), metrics=0)
    log = [{"step": step, "env/success_rate": won / episodes} for step, won in enumerate(wins, 1)]
    (run.folder / f"checkpoint-{len(wins)}" / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    write_record(tmp_path / "a.json", collect(run, 1.0))
    arm, levels = Arm("a", Part(Path("r.py"), Path("c.yaml"), {}), (1,)), {"solved": 0.8, "trapped": 0.8}
    study = Study(name="s", path=tmp_path, warm_start=None, arms=(arm,), baseline="a", window=5, smooth=5, **levels)
    (outcome,) = judge(study, [read_record(tmp_path / "a.json")]).itertuples()
    assert outcome.solved_at == 5 and not outcome.solved and not outcome.trapped  # above or below, not at


def test_a_copied_checkpoint_has_no_log_of_the_run(tmp_path):
    run = run_of(tmp_path)
    trained(run.folder, steps=4, metrics=0)
    shutil.copytree(run.folder / "checkpoint-2", run.folder / "checkpoint-4-copy")
    assert collect(run, 1.0).curves["rl_step"] == [1, 2, 3, 4]


def test_a_run_without_a_log_is_refused(tmp_path):
    run = run_of(tmp_path)
    run.folder.mkdir()
    with pytest.raises(InputError, match="has no checkpoint and therefore no log; set a save_strategy"):
        collect(run, 1.0)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"arm": "a", "evaluations": [{}]}', "{'"])
def test_a_damaged_record_is_named(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError, match=r"a\.json is not a record of a run"):
        read_record(tmp_path / "a.json")


def test_a_record_survives_any_name(tmp_path):
    record = Record('λ "x" \\ | $', 1, "d", {"fields": {"a": None}}, "v", 1.0, {"rl_step": [1], "m": [None]})
    write_record(tmp_path / "a.json", record)
    assert read_record(tmp_path / "a.json") == record
