"""One trainer that trains again, as in a notebook: a run begins as the first one did, or as its checkpoint says."""

import math
from functools import partial

import pytest
import torch
from run_kit import StopAt, assert_bit_equal, left, logged, resumable, resumable_ppo, weights
from trainer_kit import make_model, make_ppo, make_trainer, results_of, saved
from transformers import AutoModelForCausalLM, TrainerCallback

pytestmark = pytest.mark.slow

INSIDE = {"per_device_train_batch_size": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2}


class InterruptAt(TrainerCallback):
    """Ctrl-C right after an optimizer step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.step = None
            raise KeyboardInterrupt


@pytest.mark.parametrize("make", [make_trainer, make_ppo])
def test_a_second_run_has_the_schedules_of_the_first(tmp_path, make):
    trainer = make(tmp_path, max_steps=4)
    trainer.train()
    names = ("epo/beta", "epo/lambda", "learning_rate")
    first = [logged(trainer, name) for name in names]
    assert len(set(first[0])) == 4 and len(trainer.methods["epo"].history.state_dict()["entries"]) == 4
    before = weights(trainer)
    trainer.train()
    assert [logged(trainer, name) for name in names] == first
    assert trainer.rl_step == 4 and len(trainer.methods["epo"].history.state_dict()["entries"]) == 4
    assert any(not torch.equal(before[name], now) for name, now in weights(trainer).items())


def test_a_second_run_does_not_claim_settings_that_the_trainer_does_not_use(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.args.learning_rate = 2e-3  # no optimizer has it yet
    trainer.train()
    assert logged(trainer, "learning_rate") == [2e-3]
    for name, value in {"epo_lambda": 0.5, "credit": "gigpo", "success_reward": 1.0, "learning_rate": 0.5}.items():
        made_with = getattr(trainer.args, name)
        setattr(trainer.args, name, value)
        with pytest.raises(ValueError, match=f"{name}: expected {made_with!r}, .* got {value!r}; make a new trainer"):
            trainer.train()
        setattr(trainer.args, name, made_with)
    trainer.args.max_steps, trainer.args.lr_scheduler_type = 2, "linear"
    trainer.train()
    assert logged(trainer, "learning_rate") == [2e-3, 1e-3]


def test_a_second_run_controls_trls_entropy_bonus_as_the_first_did(tmp_path):
    """Ctrl-C comes between the two passes of the second update, after the coefficient has risen."""
    begins = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            begins.append((trainer.entropy_coef, trainer._last_world_entropy, trainer._entropy_window_stats))
            begins[-1] += (trainer._current_train_step_time,)

        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 1 == len(begins):
                raise KeyboardInterrupt

    adaptive = {"use_adaptive_entropy": True, "entropy_target": 100.0, "entropy_coef_delta": 0.125, "epo_lambda": 0.0}
    trainer = resumable(tmp_path, callbacks=[Watch()], max_steps=2, **adaptive)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.entropy_coef == 0.125 and trainer._entropy_window_stats is not None
    trainer.train()
    assert begins == [(0.0, math.inf, None, 0.0)] * 2 and logged(trainer, "entropy_coef") == [0.125, 0.25]


@pytest.mark.parametrize(
    ("make", "more"), [(resumable, []), pytest.param(resumable_ppo, ["critic/value_loss"], marks=pytest.mark.slow)]
)
def test_after_an_interruption_inside_a_batch_the_same_trainer_resumes_as_a_new_one_does(tmp_path, make, more):
    """Ctrl-C comes in the middle of the third RL step; the checkpoint is of the end of the second."""
    changes = {**INSIDE, "save_steps": 4, "max_steps": 8}
    straight = make(tmp_path / "straight", **changes)
    straight.train()
    again = make(tmp_path / "again", callbacks=[InterruptAt(5)], **changes)
    with pytest.raises(KeyboardInterrupt):
        again.train()
    assert again.micro_steps_done
    again.train(resume_from_checkpoint=True)
    assert_bit_equal(weights(again), weights(straight))
    for name in ("entropy/all_tokens", "epo/entropy_loss", *more):
        assert logged(again, name) == logged(straight, name) and all(map(math.isfinite, logged(again, name)))


def test_an_interrupted_run_resumes_itself_and_not_an_earlier_run_of_its_folder(tmp_path):
    interrupt = InterruptAt(None)
    trainer = resumable(tmp_path, callbacks=[interrupt], save_steps=1, max_steps=3)
    trainer.train()
    earlier = left(tmp_path)
    assert earlier == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    interrupt.step = 2
    with (
        pytest.raises(KeyboardInterrupt),
        pytest.warns(UserWarning, match="checkpoint-3 is of an earlier run: renamed to _abandoned-1-checkpoint-3"),
    ):
        trainer.train()
    assert left(tmp_path) == ["checkpoint-1"]
    assert {path.name for path in tmp_path.glob("_abandoned*")} == {f"_abandoned-1-{name}" for name in earlier}
    passes = results_of(trainer, "training_step")
    trainer.train(resume_from_checkpoint=True)
    assert len(passes) == 2 * trainer.args.gradient_accumulation_steps and trainer.state.global_step == 3


def test_a_method_that_is_new_after_a_checkpoint_inside_a_batch_gets_a_batch_of_its_own(tmp_path):
    """The old batch has no marks for it."""
    changes = {**INSIDE, "save_steps": 1, "max_steps": 6}
    resumable(tmp_path, callbacks=[StopAt(3)], **changes).train()
    other = resumable(
        tmp_path, resume_with_changes=True, entropy_method=["epo", "decision-bonus"],
        method_kwargs={"decision-bonus": {"weight": 0.01, "threshold": 0.1}}, **changes,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="resumed with other settings: .*entropy_method"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert other.state.global_step == 6 and other.rl_step == 3


def test_a_kl_term_that_is_new_after_a_checkpoint_inside_a_batch_gets_a_batch_with_the_reference(tmp_path):
    changes = {**INSIDE, "save_steps": 1, "max_steps": 6}
    saved(make_model(), tmp_path / "start")
    load = partial(AutoModelForCausalLM.from_pretrained, tmp_path / "start")
    resumable(tmp_path / "run", model=load(), callbacks=[StopAt(3)], **changes).train()
    other = resumable(tmp_path / "run", model=load(), resume_with_changes=True, beta=0.05, **changes)
    with pytest.warns(UserWarning, match="resumed with other settings: .*beta"):
        other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert other.rl_step == 3 and logged(other, "kl")[0] > 0


def test_another_temperature_after_a_checkpoint_inside_a_batch_gets_a_batch_with_log_probs_at_it(tmp_path):
    changes = {**INSIDE, "save_steps": 1, "max_steps": 4, "learning_rate": 0.0}
    resumable(tmp_path, callbacks=[StopAt(3)], **changes).train()
    other = resumable(tmp_path, resume_with_changes=True, temperature=2.0, **changes)
    scored = results_of(other, "_get_per_token_logps_and_entropies")
    with pytest.warns(UserWarning, match="resumed with other settings: .*temperature"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    old = other._buffered_inputs[3]["old_per_token_logps"]
    torch.testing.assert_close(scored[-1][0].detach(), old)


def test_between_updates_is_where_an_update_has_ended_though_an_epoch_s_last_one_is_short(tmp_path):
    """Passes 1 to 6 are an epoch: updates of four and of two."""
    settings = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "gradient_accumulation_steps": 4}
    trainer = make_trainer(tmp_path, max_steps=4, **settings)
    trainer.train_dataset = trainer.train_dataset.select(range(6))
    trainer.save_checkpoint = lambda: "saved"
    asked, collect = [], trainer._collect

    def spy(tasks):
        asked.append((trainer._step, trainer.state.global_step, trainer.save_between_updates()))
        return collect(tasks)

    trainer._collect = spy
    trainer.train()
    ended = {step: found for step, _, found in asked}
    updates = dict.fromkeys(step for _, step, _ in asked)
    assert list(updates) == [0, 1, 2, 3] and len(ended) == 6
    assert ended == {0: "saved", 2: None, 4: "saved", 6: "saved", 8: None, 10: "saved"}


def test_vllm_gets_the_best_weights_after_they_were_loaded(tmp_path, monkeypatch):
    """TRL sends weights when the optimizer step is another one than at the last time."""
    trainer = make_trainer(tmp_path)
    loaded = []
    monkeypatch.setattr("transformers.Trainer._load_best_model", lambda self: loaded.append(True))
    trainer._last_loaded_step = trainer.state.global_step = 7
    trainer._load_best_model()
    assert loaded and trainer._last_loaded_step != trainer.state.global_step
