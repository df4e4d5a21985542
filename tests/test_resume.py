"""Checkpoints of a trainer: whole before the old one goes, resumed with the same settings only, exact at any step."""

import dataclasses
import re
from pathlib import Path

import pytest
from datasets import Dataset
from peft import LoraConfig
from test_epo_trainer import StopAt, assert_bit_equal, resumable, weights
from trainer_kit import make_model, make_trainer

from epo_trl.envs.toy import ToySuite
from epo_trl.experiment import newest_checkpoint
from epo_trl.trainers import EPOPPOConfig, epo_trainer
from epo_trl.trainers.checkpoint_files import MANIFEST, checkpoints, damage
from epo_trl.trainers.resume_check import MAY_CHANGE, differences, settings_of

DOCS = Path(__file__).parents[1] / "docs"


def left(folder):
    return [path.name for path in checkpoints(folder)]


# ------------------------------------------------------------------------------------------------------------ settings


def test_the_fields_that_may_change_exist_and_are_those_of_the_docs():
    names = {field.name for field in dataclasses.fields(EPOPPOConfig)}
    assert MAY_CHANGE <= names
    page = (DOCS / "long_runs.md").read_text(encoding="utf-8")
    listed = page.partition("<!-- may change: begin -->")[2].partition("<!-- may change: end -->")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == MAY_CHANGE
    assert not MAY_CHANGE & {"learning_rate", "seed", "max_steps", "epo_lambda", "critic", "bf16", "num_generations"}


def test_differences_are_told_by_name_and_both_values():
    saved = {"lr": 0.1, "world_size": 8, "adapter": {"r": 8, "alpha": 1}, "gone": 1, "kwargs": {"a": 1}}
    now = {"lr": 0.2, "world_size": 8, "adapter": {"r": 4, "alpha": 1}, "new": 1, "kwargs": {}}
    assert differences(saved, now) == [
        "adapter.r: 8 in the checkpoint, 4 now",
        "kwargs: {'a': 1} in the checkpoint, {} now",
        "lr: 0.1 in the checkpoint, 0.2 now",
    ]
    assert differences(saved, saved) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"learning_rate": 5e-3}, r"learning_rate: 0\.01 in the checkpoint, 0\.005 now"),
        ({"max_steps": 9}, "max_steps: 6 in the checkpoint, 9 now"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "lr_scheduler_kwargs: "),
        (
            {"train_dataset": Dataset.from_dict({"prompt": ToySuite().task_ids("train")[:7]})},
            "train_tasks: .*7 tasks, sha256",
        ),
        ({"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}, r"adapter: \{\} in"),
    ],
    ids=["rate", "steps", "schedule", "tasks", "adapter"],
)
def test_a_setting_that_changes_the_result_is_seen(tmp_path, changes, line):
    one, other = settings_of(resumable(tmp_path)), settings_of(resumable(tmp_path, **changes))
    assert any(re.match(line, found) for found in differences(one, other))


def test_settings_that_do_not_matter_are_not_compared(tmp_path):
    one = settings_of(resumable(tmp_path))
    other = settings_of(
        resumable(tmp_path / "moved", logging_steps=7, save_steps=1, eval_episodes=2, report_to=["tensorboard"])
    )
    assert differences(one, other) == []


@pytest.mark.slow
def test_other_settings_are_refused_with_the_difference_shown_unless_forced(tmp_path):
    resumable(tmp_path, max_steps=3).train()
    checkpoint = str(tmp_path / "checkpoint-3")
    with pytest.raises(
        ValueError, match="(?s)resume_from_checkpoint: .*max_steps: 3 in the checkpoint, 4 now.*resume_"
    ):
        resumable(tmp_path, max_steps=4).train(resume_from_checkpoint=checkpoint)
    forced = resumable(tmp_path, max_steps=4, resume_with_changes=True)
    with pytest.warns(UserWarning, match="resumed with other settings: max_steps: 3"):
        forced.train(resume_from_checkpoint=checkpoint)
    assert forced.state.global_step == 4


# --------------------------------------------------------------------------------------------------------- whole or not


@pytest.mark.slow
def test_after_a_truncated_file_the_run_goes_on_from_the_one_before_and_ends_the_same(tmp_path):
    changes = {"save_steps": 1, "max_steps": 4}
    straight = resumable(tmp_path / "straight", **changes)
    straight.train()
    resumable(tmp_path / "run", callbacks=[StopAt(3)], **changes).train()
    newest = tmp_path / "run" / "checkpoint-3"
    (newest / "optimizer.pt").write_bytes((newest / "optimizer.pt").read_bytes()[:-9])
    (newest / "of_another_run.bin").write_bytes(b"stale")

    resumed = resumable(tmp_path / "run", **changes)
    with pytest.raises(ValueError, match="resume_from_checkpoint: got .*checkpoint-3, where optimizer.pt is damaged"):
        resumed.train(resume_from_checkpoint=str(newest))
    with pytest.warns(UserWarning, match="checkpoint-3 is passed over: optimizer.pt is damaged"):
        assert newest_checkpoint(resumed.args) == str(tmp_path / "run" / "checkpoint-2")
    with pytest.warns(UserWarning, match="passed over"):
        resumed.train(resume_from_checkpoint=True)
    assert_bit_equal(weights(resumed), weights(straight))
    assert damage(newest) is None and not (newest / "of_another_run.bin").exists()


def test_true_without_a_whole_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="resume_from_checkpoint: got True, but .* has no whole checkpoint"):
        make_trainer(tmp_path, model=make_model()).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_the_old_checkpoint_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    changes = {"save_steps": 1, "save_total_limit": 1, "max_steps": 3}

    class KilledError(Exception):
        pass

    def seal_or_die(folder, seal=epo_trainer.seal):
        if folder.endswith("-3"):
            raise KilledError
        assert left(tmp_path) in (["checkpoint-1"], ["checkpoint-1", "checkpoint-2"])
        seal(folder)

    monkeypatch.setattr(epo_trainer, "seal", seal_or_die)
    with pytest.raises(KilledError):
        resumable(tmp_path, **changes).train()
    assert left(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    assert damage(tmp_path / "checkpoint-2") is None and not (tmp_path / "checkpoint-3" / MANIFEST).exists()
