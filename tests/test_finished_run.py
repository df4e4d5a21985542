"""A run ends once: the same command afterwards changes no byte, and more steps go on from where it ended."""

import hashlib

import pytest
import torch
from datasets import Dataset
from run_kit import StopAt, assert_bit_equal, resumable, resumable_ppo, weights
from trainer_kit import make_trainer, make_warm_start
from trl import ModelConfig

from epo_trl.cli import imitation
from epo_trl.cli.imitation import DemonstrationArguments
from epo_trl.envs.toy import ToySuite
from epo_trl.errors import InputError
from epo_trl.runs.files import FINISHED

TASKS = Dataset.from_dict({"prompt": ToySuite().task_ids("train")[:4]})  # two steps are an epoch
WATCHED = {"eval_on_start": True, "report_to": ["tensorboard"], "logging_first_step": True}
BY_STEPS = {"max_steps": 3, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, **WATCHED}
BY_EPOCHS = {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch", **WATCHED}


def everything(folder):
    """Returns the checksum of every file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def never(*_, **__):
    raise AssertionError("something was trained, played or logged")


def started_again(make, folder, **changes):
    """Returns the trainer after the same command, in which nothing may be trained, evaluated or reported."""
    trainer = make(folder, **changes)
    trainer.training_step = trainer.play = never
    trainer.train_to_end()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "changes", "end"),
    [(resumable, {**BY_EPOCHS, "train_dataset": TASKS}, 4), (resumable_ppo, BY_STEPS, 3)],
    ids=["by epochs", "PPO by steps"],
)
def test_a_run_ends_once_and_goes_on_when_more_steps_are_asked_for(tmp_path, make, changes, end):
    straight = make(tmp_path, **changes)
    straight.train_to_end()
    files = everything(tmp_path)
    assert {"model.safetensors", "evaluations/step_000000.json", f"evaluations/step_{end:06d}.json"} <= files.keys()
    assert any("tfevents" in name for name in files) and straight.state.global_step == end

    with pytest.warns(UserWarning, match=f"is finished, at step {end}: nothing is trained or written. To continue"):
        again = started_again(make, tmp_path, **changes)
    assert everything(tmp_path) == files
    assert_bit_equal(weights(again), weights(straight))
    assert again.state.global_step == end and again.rl_step == straight.rl_step

    for name in (FINISHED, "model.safetensors"):
        (tmp_path / name).unlink()  # as if it had been killed between the last checkpoint and the final save
    started_again(make, tmp_path, **changes)
    assert everything(tmp_path) == files

    more = {**changes, "max_steps": end + 2, "resume_with_changes": True}
    longer = make(tmp_path, **more)
    with pytest.warns(UserWarning, match=f"resumed with other settings: .*{end + 2} now"):
        longer.train_to_end()
    assert longer.state.global_step == end + 2
    files, before = everything(tmp_path), files
    assert files["model.safetensors"] != before["model.safetensors"]
    with pytest.warns(UserWarning, match=f"is finished, at step {end + 2}"):
        started_again(make, tmp_path, **more)
    assert everything(tmp_path) == files


@pytest.mark.slow
def test_a_run_that_has_finished_without_a_checkpoint_is_left_as_it_is(tmp_path):
    changes = {"max_steps": 1, "save_strategy": "no"}
    trainer = make_trainer(tmp_path, **changes)
    start = weights(trainer)
    trainer.train_to_end()
    assert any(not torch.equal(start[name], now) for name, now in weights(trainer).items())
    files = everything(tmp_path)
    with pytest.raises(ValueError, match="output_dir: expected a checkpoint in .*, where a run has finished, got none"):
        started_again(make_trainer, tmp_path, **changes)
    assert everything(tmp_path) == files


@pytest.mark.slow
def test_a_run_that_a_callback_has_ended_is_finished_too(tmp_path):
    resumable(tmp_path, save_steps=1, callbacks=[StopAt(1)]).train_to_end()
    files = everything(tmp_path)
    with pytest.warns(UserWarning, match="is finished, at step 1"):
        assert started_again(resumable, tmp_path, save_steps=1).state.global_step == 1
    assert everything(tmp_path) == files


def test_a_finished_run_keeps_its_settings_if_the_changes_leave_nothing_to_train(tmp_path):
    resumable(tmp_path, max_steps=1, save_steps=1).train_to_end()
    files = everything(tmp_path)
    with pytest.raises(ValueError, match="learning_rate: 0.01 there, 0.001 now"):
        started_again(resumable, tmp_path, max_steps=1, save_steps=1, learning_rate=1e-3)
    with pytest.warns(UserWarning, match="is finished, at step 1: nothing is trained or written. To .*raise max_steps"):
        started_again(resumable, tmp_path, max_steps=1, save_steps=1, learning_rate=1e-3, resume_with_changes=True)
    assert everything(tmp_path) == files


def test_the_best_policy_of_a_finished_run_is_loaded_wherever_its_folder_is(tmp_path):
    """The first of two evaluations is the best; the model card is about it."""
    changes = {"max_steps": 2, "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    changes |= {"load_best_model_at_end": True, "metric_for_best_model": "iid/score"}
    trainer = resumable(tmp_path / "here", **changes)
    trainer.evaluate = lambda **_: {"eval_iid/score": -trainer.state.global_step}
    trainer.train_to_end()
    assert "| 1 of 2, the best by `iid/score` |" in (tmp_path / "here" / "README.md").read_text()
    (tmp_path / "here").rename(tmp_path / "there")
    again = started_again(resumable, tmp_path / "there", **changes)
    assert_bit_equal(weights(again), weights(trainer))
    assert again.state.best_model_checkpoint == str(tmp_path / "there" / "checkpoint-1")


@pytest.mark.slow
def test_a_warm_start_ends_once_too(tmp_path, monkeypatch):
    monkeypatch.setattr(ToySuite, "settings", {"sizes": (1, 2)})  # a tuple, which JSON returns as a list

    def warm_start(folder, rows=8):
        return make_warm_start(folder, [[5, 6, 7, 8 + i] for i in range(rows)])

    straight = warm_start(tmp_path)
    straight.train_to_end()
    files = everything(tmp_path)
    assert straight.state.global_step == 2 and "model.safetensors" in files
    again = warm_start(tmp_path)
    again.training_step = never
    with pytest.warns(UserWarning, match="is finished, at step 2"):
        again.train_to_end()
    assert everything(tmp_path) == files
    assert_bit_equal(weights(again), weights(straight))
    with pytest.raises(ValueError, match="train_data: '8 rows, sha256 .* now"):
        warm_start(tmp_path, rows=9).train_to_end()
    monkeypatch.setattr(imitation, "demonstrations", never)
    same = {name: getattr(again.args, name) for name in ("per_device_train_batch_size", "save_steps", "bf16")}
    for shown, changes, refusal in (
        (DemonstrationArguments(episodes=9), {}, "(?s)demonstrations.episodes: 1000 there, 9 now.*another output_dir"),
        (DemonstrationArguments(), {"learning_rate": 0.5}, "learning_rate: .*, 0.5 now"),
        (DemonstrationArguments(), {}, "something was"),  # with its own settings it comes to the expert
    ):
        args = imitation.ImitationConfig(str(tmp_path), use_cpu=True, max_steps=2, **same, **changes)
        with pytest.raises((InputError, AssertionError), match=refusal):
            imitation.imitate(ToySuite(), shown, args, ModelConfig("tiny"))
