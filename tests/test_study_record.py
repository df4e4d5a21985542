"""The record of a run."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from epo_trl.lab.study.config import Arm, Study, StudyRun
from epo_trl.lab.study.outcomes import judge
from epo_trl.lab.study.record import (
    COMPLETE,
    POINTS,
    THINNED,
    THIRDS,
    EvaluationRecord,
    collect,
    read_records,
    rl_points,
    thin,
    write_records,
)

SUCCESS, ENTROPY = "env/success_rate", "entropy/all_tokens"


def run_of(folder, arm="a", name="a-seed1", **settings):
    return StudyRun(arm, 1, folder / name, Path("r.py"), Path("c.yaml"), settings, {"seed": 1})


def kept(path, record):
    """Writes a record and reads it."""
    write_records(path / "records.json", {"a-seed1": record})
    return read_records(path / "records.json")["a-seed1"]


def test_optimizer_steps_become_rl_steps_and_what_one_logs_twice_is_averaged():
    history = [
        {"step": 1, SUCCESS: 0.5, ENTROPY: 1.0, "time/all": 9, "epoch": 0.1},
        {"step": 2, ENTROPY: 2.0},
        {"step": 3, SUCCESS: 0.25, ENTROPY: float("nan"), "eval_iid/success_rate": 1.0},
        {"step": 4, ENTROPY: 3.0, "flag": True, "text": "x"},
    ]
    assert rl_points(history, 2.0).to_dict("index") == {
        1: {SUCCESS: 0.5, ENTROPY: 1.5}, 2: {SUCCESS: 0.25, ENTROPY: 3.0},
    }  # fmt: skip
    # A log of two RL steps: an optimizer step that uses up two batches.
    both = rl_points(history, 0.5)
    assert list(both.index) == [*range(1, 9)] and both[ENTROPY].dropna().tolist() == [1, 1, 2, 2, 3, 3]


def test_thinning_keeps_means_and_the_last_step_of_each():
    curves = pd.DataFrame({"x": [1.0, 3.0, None, 5.0, 9.0], "y": [None, None, 1.0, 2.0, 3.0]}, [1, 2, 3, 4, 5])
    thinned = pd.DataFrame({"x": [2.0, 5.0, 9.0], "y": [None, 1.5, 3.0]}, [2, 4, 5])
    pd.testing.assert_frame_equal(thin(curves, 3), thinned)
    pd.testing.assert_frame_equal(thin(curves, 99), curves)
    assert thin(curves[:0], 3).empty


def trained(folder, steps=4, updates=1, evaluations=(), log=None):
    """Leaves what a trainer leaves; the last of two checkpoints has the whole log, a copy of the first is none."""
    names = [*COMPLETE, *THINNED, *THIRDS.values(), "other"]
    log = log or [{"step": n, **dict.fromkeys(names, 0.123456 * n % 1)} for n in range(1, steps * updates + 1)]
    for name, part in (("", log[: len(log) // 2]), ("", log), ("-copy", log[:1])):
        checkpoint = folder / f"checkpoint-{len(part)}{name}"
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


def test_a_long_run_is_kept_in_a_few_kilobytes_and_read_back_as_it_was(tmp_path):
    run = run_of(tmp_path)
    trained(run.folder, steps=400, updates=4, evaluations=[(0, REPORT), (1600, REPORT)])
    record = collect(run, 61.26)
    assert kept(tmp_path, record) == record and (tmp_path / "records.json").stat().st_size < 15_000
    assert record.seconds == 61.3 and record.curves.keys() == set(COMPLETE)
    assert record.curve(SUCCESS).index.tolist() == list(range(1, 401))
    # RL step 1 is optimizer steps 1 to 4: 0.123456 * (1 + 2 + 3 + 4) / 4 = 0.30864
    assert record.curves[SUCCESS][0] == 0.30864 and record.curves[ENTROPY][0] == 0.309
    assert record.thinned.keys() == {"rl_step", *THINNED} and len(record.thinned["kl"]) <= POINTS
    assert record.thinned["rl_step"][:2] == [14, 28] and record.left_band.keys() == THIRDS.keys()
    assert [one.rl_step for one in record.evaluations] == [0, 400] and record.evaluations[0].rate == 0.25
    counts = {name: REPORT[name] for name in ("turns", "invalid_turns", "wait_turns", "score_sum", "stop_reasons")}
    one = EvaluationRecord(0, "iid", "tiny", 100, 400, {"look": [90, 300], "cool": [10, 100]}, counts)
    assert replace(record.evaluations[0], rules="") == one


def test_the_step_at_which_a_third_of_the_episode_left_the_band_is_kept(tmp_path):
    run, names = run_of(tmp_path), [*THIRDS.values()]
    out = {names[0]: 5, names[1]: 8, names[2]: 99}
    trained(run.folder, log=[{"step": n, **{name: 1.0 + (n >= out[name]) for name in names}} for n in range(1, 31)])
    record = kept(tmp_path, collect(run, 1.0))
    assert record.left_band == {"first": 5, "middle": 8, "last": None} and record.curves == record.thinned == {}


def test_an_evaluation_knows_the_settings_of_its_protocol_apart_from_its_name(tmp_path):
    plain = {"name": "tiny", "description": "x", "temperature": 1.0, "env_options": {"a": 1, "b": 2}}
    same = {"env_options": {"b": 2, "a": 1}, "temperature": 1.0, "name": "other", "description": "y"}
    found = []
    for protocol in (plain, same, {**plain, "temperature": 0.0}):
        run = run_of(tmp_path / str(len(found)))
        trained(run.folder, evaluations=[(2, {**REPORT, "protocol": protocol})])
        found.append(kept(tmp_path, collect(run, 1.0)).evaluations[0].rules)
    assert found[0] == found[1] != found[2] and all(found)


def test_a_record_knows_the_weights_that_its_run_began_with(tmp_path):
    """Those of the warm start wherever it lies, or the model of the config."""
    found = []
    for place, weights in (("here", b"x"), ("there", b"x"), ("other", b"y")):
        start = run_of(tmp_path / place, None, "warm-start-seed1")
        start.folder.mkdir(parents=True)
        (start.folder / "model.safetensors").write_bytes(weights)
        run = replace(run_of(tmp_path / place), needs=start)
        trained(run.folder)
        found.append(collect(run, 1.0).begins_with)
    assert found[0] == found[1] != found[2] and str(tmp_path) not in "".join(found)
    run = run_of(tmp_path, model_name_or_path="hub/x", model_revision="v2")
    trained(run.folder)
    assert collect(run, 1.0).begins_with == "hub/x@v2"


@pytest.mark.parametrize(("wins", "episodes"), [((13, 12, 13, 13, 13), 16), ((9, 10, 10, 9, 10), 12)])
def test_a_run_that_reaches_a_level_exactly_does_so_by_its_record(tmp_path, wins, episodes):
    """64 of 80 and 48 of 60 episodes."""
    run = run_of(tmp_path)
    trained(run.folder, log=[{"step": step, SUCCESS: won / episodes} for step, won in enumerate(wins, 1)])
    arm, levels = Arm("a", Path("r.py"), Path("c.yaml"), {}, (1,)), {"solved": 0.8, "trapped": 0.8}
    study = Study(name="s", path=tmp_path, warm_start=None, arms=(arm,), baseline="a", window=5, smooth=5, **levels)
    (outcome,) = judge(study, [kept(tmp_path, collect(run, 1.0))]).itertuples()
    assert outcome.solved_at == 5 and not outcome.solved and not outcome.trapped  # above or below, not at
