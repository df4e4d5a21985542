"""SIGTERM saves a checkpoint and ends the run; the same command goes on, as if nothing had happened."""

import signal

import pytest
from datasets import Dataset
from run_kit import SendSignals, left, recipe
from trainer_kit import make_trainer

from epo_trl.envs.toy import ToySuite
from epo_trl.runs.callbacks import EXIT_CODE

pytestmark = pytest.mark.slow
EPOCH = Dataset.from_dict({"prompt": ToySuite().task_ids("train")[:4]})  # two steps


def send_sigterm(event, step):
    """Returns a callback that sends it twice."""
    return SendSignals(event, step, signal.SIGTERM, signal.SIGTERM)


def run(folder, *callbacks, **changes):
    trainer = make_trainer(folder, callbacks=list(callbacks), **{"max_steps": 4, **changes})
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("event", "changes"),
    [
        ("on_step_begin", {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}),
        ("on_evaluate", {"eval_strategy": "steps", "eval_steps": 2}),
        ("on_save", {"save_strategy": "steps", "save_steps": 2}),
        ("on_evaluate", {"save_strategy": "epoch", "eval_strategy": "epoch", "train_dataset": EPOCH}),
    ],
    ids=["in a step", "in an evaluation", "while saving", "in the evaluation of an epoch"],
)
def test_the_step_in_progress_is_finished_saved_and_the_last(tmp_path, event, changes):
    before = signal.getsignal(signal.SIGTERM)
    trainer = run(tmp_path, send_sigterm(event, 1 if event == "on_step_begin" else 2), **changes)
    assert trainer.preempted and trainer.state.global_step == 2
    assert left(tmp_path) == ["checkpoint-2"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_in_the_last_step_is_a_finished_run(tmp_path):
    trainer = run(tmp_path, send_sigterm("on_step_begin", 1), max_steps=2)
    assert not trainer.preempted and left(tmp_path) == []


def test_a_recipe_exits_with_143_and_writes_no_final_model(tmp_path, monkeypatch):
    """143 = 128 + 15. The model in the output folder would be taken for a finished one."""
    main, made = recipe(monkeypatch, tmp_path, send_sigterm("on_step_begin", 0), max_steps=3)
    with pytest.raises(SystemExit) as stop:
        main(None)
    assert stop.value.code == EXIT_CODE == 143
    assert left(tmp_path) == ["checkpoint-1"] and not (tmp_path / "model.safetensors").exists()
    assert not made[0].envs
