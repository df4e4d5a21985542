"""A training run on ScienceWorld goes on when a JVM is killed under it, and leaves no Java process behind."""

import os
import signal

import psutil
import pytest
import torch
from run_kit import logged
from trainer_kit import make_config

from epo_trl.envs.scienceworld import ScienceWorldSuite
from epo_trl.models import build_model, build_tokenizer
from epo_trl.trainers import EPOTrainer
from epo_trl.types import StopReason

pytestmark = [pytest.mark.games, pytest.mark.slow]

TASK = "train/lifespan-longest-lived/0"


def java_children():
    return [child.pid for child in psutil.Process().children() if child.name() == "java"]


class OneTask(ScienceWorldSuite):
    def task_ids(self, split):
        return [TASK] * 8


def test_a_run_goes_on_when_a_jvm_is_killed_under_it(tmp_path):
    suite = OneTask(timeout_seconds=300.0, jvms=2)  # patient: a busy machine starts one slowly
    tokenizer = build_tokenizer(["look around , open door to kitchen"])
    model = build_model(tokenizer, hidden_size=32, heads=2)
    args = make_config(
        tmp_path, per_device_train_batch_size=4, max_steps=3, max_turns=2, prompt_template="scienceworld_compact",
        max_prompt_length=900, max_completion_length=4, epo_lambda=0.1,
    )  # fmt: skip
    trainer = EPOTrainer(model, suite, args=args, processing_class=tokenizer)
    generate, calls, rollouts = trainer._generate_single_turn, [], []

    def kill_in_the_second_rollout(*arguments):
        calls.append(sorted(java_children()))
        if len(calls) == 3:  # its first turn: the games have begun, no action has been sent
            os.kill(trainer.envs[1]._host._jvms[-1].process.pid, signal.SIGKILL)
        return generate(*arguments)

    trainer._generate_single_turn = kill_in_the_second_rollout
    play = trainer.play
    trainer.play = lambda *args, **kwargs: rollouts.append(play(*args, **kwargs)) or rollouts[-1]
    trainer.train()

    assert [[e.stop is StopReason.ABORTED for e in episodes] for episodes in rollouts] == [
        [False] * 4,
        [False, True] * 2,  # those on the killed JVM
        [False] * 4,
    ]
    assert all("died with exit status -9" in rollouts[1][i].error for i in (1, 3))
    assert logged(trainer, "env/aborted") == [0.0, 0.5, 0.0]
    assert logged(trainer, "env/restarts") == [0.0, 0.0, 1.0]
    assert trainer.state.global_step == 3
    assert all(torch.isfinite(p).all() for p in model.parameters())
    first, *_, last = calls
    assert len(first) == len(last) == 2 and len(set(first) & set(last)) == 1  # one of the two was replaced
    trainer.close_envs()
    assert java_children() == []
