"""Checkpoints of a trainer: whole before the old one goes, resumed with the same settings only, exact at any step."""

import dataclasses
import json
import os
import pickle
import re
import shutil
import signal
from copy import deepcopy
from pathlib import Path

import forked
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from run_kit import (
    MINI_BATCHES,
    EachStep,
    SendSignals,
    StopAt,
    assert_bit_equal,
    left,
    logged,
    resumable,
    resumable_ppo,
    weights,
)
from trainer_kit import make_model, make_trainer, make_warm_start
from trainer_kit import saved as stored

from epo_trl import ImitationConfig
from epo_trl.envs.toy import ToySuite
from epo_trl.errors import InputError
from epo_trl.rollout.templates import TEMPLATES
from epo_trl.runs import long_run
from epo_trl.runs.files import checkpoints, last_checkpoint
from epo_trl.runs.run_settings import MAY_CHANGE, differences, settings_of
from epo_trl.trainers import EPOPPOConfig

TESTS = Path(__file__).parent


# ------------------------------------------------------------------------------------------------------------ settings


def test_the_fields_that_may_change_exist_and_are_none_of_those_that_decide_the_result():
    names = {field.name for kind in (EPOPPOConfig, ImitationConfig) for field in dataclasses.fields(kind)}
    assert MAY_CHANGE <= names
    assert not MAY_CHANGE & {"learning_rate", "seed", "max_steps", "epo_lambda", "critic", "bf16", "num_generations"}


@pytest.fixture
def seen(tmp_path):
    """Returns a function that returns the settings of a run with these changes."""
    return lambda **changes: settings_of(resumable(tmp_path / "run", **changes))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"max_steps": 9}, "max_steps: 6 there, 9 now"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "lr_scheduler_kwargs: "),
        (
            {"train_dataset": Dataset.from_dict({"prompt": ToySuite().task_ids("train")[:7]})},
            "train_tasks: .*7 tasks, sha256",
        ),
        ({"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}, "adapter.default: nothing there"),
    ],
    ids=["steps", "schedule", "tasks", "adapter"],
)
def test_a_setting_that_changes_the_result_is_seen_and_no_other(seen, changes, line):
    others = {"logging_steps": 7, "save_steps": 1, "eval_episodes": 2, "report_to": ["tensorboard"]}
    (found,) = differences(seen(), seen(**changes, **others))
    assert re.match(line, found)


def test_the_data_type_and_revision_of_the_model_are_compared(seen):
    before, cast = seen(model=make_model()), seen(model=make_model().bfloat16())
    assert differences(before, cast) == ["dtype: 'float32' there, 'bfloat16' now"]
    assert differences({name: before[name] for name in before.keys() - {"dtype"}}, cast) == []  # of an earlier version
    other = seen(model=make_model(), model_init_kwargs={"revision": "v2", "attn_implementation": "eager"})
    assert differences(before, other) == ["model_revision: 'main' there, 'v2' now"]


@pytest.mark.slow
def test_intervals_of_saving_evaluation_and_the_log_may_change_on_resume(tmp_path):
    resumable(tmp_path, save_steps=2, logging_steps=2, callbacks=[StopAt(2)], max_steps=4).train()
    changed = {"save_steps": 1, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 0.25}
    resumed, evaluated = resumable(tmp_path, max_steps=4, **changed), set()
    resumed.evaluate = lambda **_: evaluated.add(resumed.state.global_step) or {}
    resumed.train(resume_from_checkpoint=True)
    assert left(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-4"] and evaluated == {3, 4}
    assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry] == [2, 3, 4]


def test_the_defaults_of_a_method_are_compared_and_writing_one_out_is_no_change(seen):
    def of(**settings):
        return seen(entropy_method=["siren"], **({"method_kwargs": {"siren": settings}} if settings else {}))

    before = of()
    assert before["methods"]["siren"] == {"weight": 0.005, "top_p": 0.8, "quantile": 0.8, "anchor": None}
    assert differences(before, of(weight=0.005)) == []
    assert differences(before, of(weight=0.1)) == ["methods.siren.weight: 0.005 there, 0.1 now"]


def test_a_template_is_its_texts_and_a_task_its_content(tmp_path, seen, monkeypatch):
    mine = Path(shutil.copytree(TEMPLATES / "compact", tmp_path / "mine"))
    before = seen(prompt_template=str(mine))
    with open(mine / "next.txt", "a", encoding="utf-8") as file:
        file.write("Hurry up.")
    monkeypatch.setattr(ToySuite, "content", lambda self, split: [{"hidden": 7}])
    names = [line.partition(":")[0] for line in differences(before, seen(prompt_template=str(mine)))]
    assert names == ["task_contents", "template.next"]


def test_a_run_with_another_setting_is_refused_unless_forced(tmp_path):
    changes = {"max_steps": 2, "save_steps": 1}
    resumable(tmp_path, callbacks=[StopAt(1)], **changes).train()
    line = "learning_rate: 0.01 there, 0.005 now"
    with pytest.raises(InputError, match=f"(?s)resume_from_checkpoint: .*checkpoint-1 was made with other .*{line}"):
        resumable(tmp_path, learning_rate=5e-3, **changes).train(resume_from_checkpoint=True)
    forced = resumable(tmp_path, learning_rate=5e-3, resume_with_changes=True, **changes)
    with pytest.warns(UserWarning, match=line):
        forced.train(resume_from_checkpoint=True)
    assert forced.state.global_step == 2


# --------------------------------------------------------------------------------------------------------- whole or not


class KilledError(Exception):
    pass


@pytest.mark.slow
def test_a_checkpoint_counts_once_it_is_complete_and_until_then_the_old_one_stays(tmp_path, monkeypatch):
    """A kill at the end of a write, a full disk in the middle of one (`/dev/full` is as full as a disk can be)."""
    changes = {"save_steps": 1, "save_total_limit": 1, "max_steps": 3}
    straight = resumable(tmp_path / "straight", **changes)
    straight.train()

    def die(folder):
        if folder.endswith("-2"):
            raise KilledError

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(long_run, "flush", die)
        resumable(tmp_path / "run", **changes).train()
    save = torch.save

    def save_to_full_disk(value, path):
        save(value, "/dev/full" if path.endswith("checkpoint-3/optimizer.pt") else path)

    with monkeypatch.context() as patch, pytest.raises((OSError, RuntimeError)):
        assert left(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]
        assert last_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-1")
        patch.setattr(torch, "save", save_to_full_disk)
        resumable(tmp_path / "run", **changes).train(resume_from_checkpoint=True)
    assert last_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-2")
    resumed = resumable(tmp_path / "run", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert left(tmp_path / "run") == ["checkpoint-3"]
    assert_bit_equal(weights(resumed), weights(straight))


# ------------------------------------------------------------------------------------------------------ one way forward


def test_true_without_a_complete_checkpoint_is_an_error(tmp_path):
    with pytest.raises(InputError, match="resume_from_checkpoint: expected a complete checkpoint in .*got none"):
        make_trainer(tmp_path, model=make_model()).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_a_run_does_not_go_back_or_start_over_in_its_folder_and_a_trainer_trains_once(tmp_path):
    changes = {"max_steps": 2, "save_steps": 1}
    trainer = resumable(tmp_path, **changes)
    trainer.train()
    with pytest.raises(InputError, match="train: expected one call per trainer"):
        trainer.train()
    for earlier in (None, str(tmp_path / "checkpoint-1")):
        with pytest.raises(InputError, match="resume_from_checkpoint: expected .*checkpoint-2, .*another output_dir"):
            resumable(tmp_path, **changes).train(resume_from_checkpoint=earlier)
    with pytest.raises(InputError, match="resume_from_checkpoint: expected .*checkpoint-2, .*got .*checkpoint-1; "):
        resumable(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-1"), **changes).train_to_end()
    assert left(tmp_path) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.slow
def test_a_run_begins_with_a_checkpoint_of_another_one_and_the_same_command_again_continues(tmp_path):
    changes = {"max_steps": 4, "save_steps": 1}
    straight = resumable(tmp_path / "other", **changes)
    straight.train()
    command = {**changes, "resume_from_checkpoint": str(tmp_path / "other" / "checkpoint-1")}
    resumable(tmp_path / "run", callbacks=[SendSignals("on_step_begin", 2, signal.SIGTERM)], **command).train_to_end()
    assert left(tmp_path / "run") == ["checkpoint-2", "checkpoint-3"]
    last, each = resumable(tmp_path / "run", **command), EachStep()
    last.add_callback(each)
    last.train_to_end()
    assert len(each.seen) == 2, "the start, and the fourth step"
    assert_bit_equal(weights(last), weights(straight))


# -------------------------------------------------------------------------------------------------------- whose it is


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.slow
def test_a_checkpoint_of_another_folder_needs_trust_and_a_plain_one_cannot_run_code_even_then(tmp_path):
    """One file after the other holds a pickle that would do something; DeepSpeed's are loaded by DeepSpeed."""
    resumable(tmp_path / "theirs", max_steps=3, **MINI_BATCHES).train()
    theirs = tmp_path / "theirs" / "checkpoint-2"
    mine = {"max_steps": 3, **MINI_BATCHES}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "checkpoint-2").symlink_to(theirs)
    for path in (theirs, tmp_path / "mine" / "checkpoint-2"):
        with pytest.raises(
            ValueError, match="resume_from_checkpoint: expected a folder in output_dir .*got .*trust_ch"
        ):
            resumable(tmp_path / "mine", trust_checkpoint=False, **mine).train(resume_from_checkpoint=str(path))

    pickled = [path for path in theirs.iterdir() if path.suffix in (".pt", ".pth")]
    names = {path.name for path in pickled}
    assert names == {"optimizer.pt", "scheduler.pt", "rng_state.pth", "methods.pt", "collected_batch_0.pt"}
    for path in pickled:
        content = path.read_bytes()
        torch.save(Evil(tmp_path / "harm"), path)
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            resumable(tmp_path / "mine", trust_checkpoint=True, **mine).train(resume_from_checkpoint=str(theirs))
        path.write_bytes(content)
    assert not (tmp_path / "harm").exists()


# --------------------------------------------------------------------------------------------------------------- exact


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "step"), [(resumable, 1), (resumable_ppo, 3)], ids=["in its first pass", "with a critic, in its second"]
)
def test_a_checkpoint_inside_a_collected_batch_resumes_bit_equal(tmp_path, make, step):
    """One RL step is four optimizer steps here, the last two of them the second pass over the batch."""
    straight = make(tmp_path / "straight", max_steps=6, **MINI_BATCHES)
    straight.train()
    assert straight.rl_step == 1
    kept = [path.name for path in checkpoints(tmp_path / "straight") if list(path.glob("collected_batch_*"))]
    assert kept == [f"checkpoint-{step}" for step in (1, 2, 3, 5, 6)]
    resumed = make(tmp_path / "resumed", max_steps=6, **MINI_BATCHES)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
    assert_bit_equal(weights(resumed), weights(straight))
    assert resumed.methods.state_dict() == straight.methods.state_dict()
    for name in ("loss", "epo/entropy_loss", "epo/share_inside_band", "entropy/late_turns", "critic/value_loss"):
        assert logged(resumed, name) == logged(straight, name), name


def divided(folder, episodes, passes, **changes):
    """Returns a run of RL steps of 8 episodes, so many of them in a forward-backward pass."""
    settings = {"per_device_train_batch_size": episodes, "gradient_accumulation_steps": passes, "save_steps": 1}
    return resumable(folder, **{**settings, "max_steps": 5, "resume_with_changes": True, **changes})


def test_a_run_resumes_with_another_division_of_its_rl_steps(tmp_path):
    divided(tmp_path, 8, 1, callbacks=[StopAt(3)]).train()
    resumed, starts = divided(tmp_path, 4, 2), []
    collect = resumed._collect
    resumed._collect = lambda tasks: starts.append((resumed._step, resumed.state.global_step)) or collect(tasks)
    other = divided(tmp_path, 8, 1, num_iterations=2)
    with pytest.raises(InputError, match="^num_iterations: expected .* 1} .*, got .* 2}: another division"):
        other.train(resume_from_checkpoint=True)
    resumed.train(resume_from_checkpoint=True)
    assert starts == [(6, 3), (8, 4)]
    assert resumed._step == 10 and resumed.rl_step == resumed.total_rl_steps == 5


@pytest.mark.parametrize("changes", [{}, {"temperature": 2.0}, {"beta": 0.05}])
def test_inside_an_rl_step_other_settings_play_a_new_batch(tmp_path, changes):
    start, settings = stored(make_model(), tmp_path / "start"), {**MINI_BATCHES, "max_steps": 2}
    resumable(tmp_path / "run", model=deepcopy(start), callbacks=[StopAt(1)], **settings).train()
    begins = []
    resumed = resumable(tmp_path / "run", model=start, resume_with_changes=True, **settings, **changes)
    collect = resumed._collect
    resumed._collect = lambda tasks: begins.append(resumed.state.global_step) or collect(tasks)
    resumed.train(resume_from_checkpoint=True)
    assert begins == ([1] if changes else [])


SYNC = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}


def test_a_reference_that_follows_the_policy_comes_back_with_a_checkpoint(tmp_path):
    start = stored(make_model(), tmp_path / "start")
    settings = {**SYNC, "max_steps": 4, "save_steps": 1, "num_iterations": 2}  # RL steps of two optimizer steps
    straight, resumed = (resumable(tmp_path / name, model=deepcopy(start), **settings) for name in ("one", "other"))
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-3"))
    assert_bit_equal(dict(resumed.ref_model.named_parameters()), dict(straight.ref_model.named_parameters()))
    assert_bit_equal(weights(resumed), weights(straight))
    assert logged(resumed, "kl") == logged(straight, "kl")


def test_a_run_resumed_between_two_logging_steps_logs_what_one_that_was_not_stopped_does(tmp_path):
    """All but the times, and the loss, which transformers averages over the steps since the checkpoint."""

    def logs(trainer):
        left_out = {"loss", "step_time"}
        return [
            {name: value for name, value in entry.items() if name not in left_out and not name.startswith("time/")}
            for entry in trainer.state.log_history
            if "loss" in entry
        ]

    settings = {**MINI_BATCHES, "num_iterations": 1, "logging_steps": 2, "max_steps": 4}
    straight, resumed = resumable(tmp_path / "straight", **settings), resumable(tmp_path / "resumed", **settings)
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    assert {"reward", "env/success_rate", "rollout/prompt_tokens"} <= logs(straight)[-1].keys()
    assert logs(resumed) == logs(straight)


BEST = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "max_steps": 4, "save_steps": 1}


def choosing(folder, **changes):
    """Returns a run with these success rates at steps 1 to 4."""
    trainer = resumable(folder, **{**BEST, "metric_for_best_model": "iid/score", **changes})
    iid, ood = (None, 0.9, 0.5, 0.4, 0.3), (None, 0.1, 0.2, 0.8, 0.3)

    def evaluate(**_):
        step, handler = trainer.state.global_step, trainer.callback_handler
        metrics = {"eval_iid/score": iid[step], "eval_ood/score": ood[step]}
        trainer.control = handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
        return metrics

    trainer.evaluate = evaluate
    return trainer


def test_the_best_policy_is_chosen_among_evaluations_that_can_be_compared(tmp_path):
    choosing(tmp_path / "here", callbacks=[StopAt(2)]).train()
    (tmp_path / "here").rename(tmp_path / "there")
    others = [{"metric_for_best_model": "ood/score"}, {"eval_temperature": 0.0}, {"eval_episodes": 3}, {"eval_seed": 1}]
    for changes in others:
        with pytest.raises(InputError, match="best_by.* there, .* now"):
            choosing(tmp_path / "there", **changes).train(resume_from_checkpoint=True)
    resumed = choosing(tmp_path / "there")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.best_step == resumed.state.best_global_step == 1


@pytest.mark.slow
def test_the_rates_of_a_resumed_run_are_those_of_its_settings_from_its_first_step(tmp_path):
    """The schedule is linear: after 3 steps of 3 the rate is 0, after 3 of 4 it is not."""

    def resume(**others):
        trainer, steps = resumable(tmp_path / str(others), max_steps=4, resume_with_changes=True, **others), EachStep()
        trainer.add_callback(steps)
        trainer.train(resume_from_checkpoint=str(tmp_path / "start" / "checkpoint-3"))
        return trainer, steps.seen

    resumable(tmp_path / "start", max_steps=3).train()
    trainer, (before, after) = resume(weight_decay=0.5, adam_beta1=0.5)
    groups = trainer.optimizer.param_groups
    assert logged(trainer, "learning_rate")[-1] == pytest.approx(trainer.args.learning_rate / 4)
    assert groups[0]["weight_decay"] == 0.5 and {group["betas"] for group in groups} == {(0.5, 0.999)}
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert_bit_equal(*resume(learning_rate=0.0)[1])


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 4], ids=["within the second epoch", "after it"])
def test_a_run_resumes_bit_equal_after_it_has_seen_all_tasks(tmp_path, step):
    """An epoch of 4 tasks is two steps; every epoch has an order of its own."""
    changes = {"train_dataset": Dataset.from_dict({"prompt": ToySuite().task_ids("train")[:4]}), "save_steps": 1}
    straight, played = resumable(tmp_path / "straight", **changes), []
    original = straight.play
    straight.play = lambda tasks, **kwargs: played.append({task for task, _ in tasks}) or original(tasks, **kwargs)
    straight.train()
    assert len(played) == 6 and len({frozenset(tasks) for tasks in played}) > 2
    resumed = resumable(tmp_path / "resumed", **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
    assert_bit_equal(weights(resumed), weights(straight))


@pytest.mark.slow
@pytest.mark.parametrize("step", [9, 12], ids=["within the second epoch", "after it"])
def test_a_warm_start_of_rows_grouped_by_length_resumes_bit_equal(tmp_path, step):
    """An epoch is six steps; each has an order of its own, of all rows."""
    rows = [[5 + (i + k) % 20 for k in range(3 + i % 7)] for i in range(24)]

    def warm_start(name):
        changes = {"train_sampling_strategy": "group_by_length", "learning_rate": 1e-2, "trust_checkpoint": True}
        return make_warm_start(tmp_path / name, rows, max_steps=15, save_steps=step, **changes)

    straight, seen = warm_start("straight"), []
    original = straight.training_step
    straight.training_step = lambda model, inputs, *rest: (
        seen.append(inputs["input_ids"].sum().item()) or original(model, inputs, *rest)
    )
    straight.train()
    assert len(seen) == 15 and sum(seen[:6]) == sum(seen[6:12]) and seen[:6] != seen[6:12]
    resumed = warm_start("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
    assert_bit_equal(weights(resumed), weights(straight))


@pytest.mark.slow
def test_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path):
    """By kill -9 at random moments: `EPO_TRL_KILLS` of them, 4 by default."""
    kills = os.environ.get("EPO_TRL_KILLS", "4")
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    done = forked.run(
        [TESTS / "killed_run.py", tmp_path, kills, "0"],
        cwd=tmp_path, log=tmp_path / "log.txt", CUDA_VISIBLE_DEVICES="", PYTHONPATH=paths,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["kills"] == int(kills) and counts["runs"] >= 1
