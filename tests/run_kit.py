"""What runs leave behind, and runs that can be stopped and resumed."""

import os
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from trainer_kit import make_ppo, make_trainer
from transformers import TrainerCallback

from epo_trl.cli import train
from epo_trl.runs.files import checkpoints
from epo_trl.trainers import epo_trainer


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def count_seconds(monkeypatch):
    """Lets a second pass whenever a trainer looks at the clock."""
    clock = SimpleNamespace(perf_counter=partial(next, count()))
    monkeypatch.setattr(epo_trainer, "time", clock)


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_bit_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = True


class EachStep(TrainerCallback):
    """Keeps the weights after each optimizer step, the start as the first."""

    def __init__(self):
        self.seen = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.on_step_end(args, state, control, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append({name: p.detach().clone() for name, p in model.named_parameters()})


class SendSignals(TrainerCallback):
    """Sends signals to this process when `event` happens at a step."""

    def __init__(self, event, step, *signals):
        self.step, self.signals = step, signals
        setattr(self, event, self._send)

    def _send(self, args, state, control, **kwargs):
        for number in self.signals * (state.global_step == self.step):
            os.kill(os.getpid(), number)


def resumable(folder, **changes):
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 6}
    settings |= {"save_strategy": "steps", "save_steps": 3, "epo_lambda": 0.1, "trust_checkpoint": True}
    return make_trainer(folder, **{**settings, **changes})


def lora(**changes):
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **changes)


KINDS = {
    "separate": {},
    "value head": {"critic": "value_head"},
    "adapter": {"peft": True},
    "two adapters": {"peft": True, "critic_use_peft": True},
}


def resumable_ppo(folder, kind="separate", **changes):
    settings = {**KINDS[kind], **changes}
    peft_config = lora() if settings.pop("peft", False) else None
    return make_ppo(
        folder, peft_config=peft_config, save_strategy="steps",
        **{"save_steps": 3, "max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
           "epo_lambda": 0.1, "gae_lambda": 0.9, "critic_learning_rate": 3e-2, "critic_warmup_steps": 1,
           "trust_checkpoint": True, **settings},
    )  # fmt: skip


MINI_BATCHES = {"per_device_train_batch_size": 2, "steps_per_generation": 4, "num_iterations": 2, "save_steps": 1}


def left(folder):
    """Returns the names of the checkpoints in a folder, the newest last."""
    return [path.name for path in checkpoints(folder)]


def recipe(monkeypatch, folder, *callbacks, **changes):
    """Returns the `main` of a recipe that trains a toy in the folder, and the trainers that it makes."""
    made = []

    def make(*_, **__):
        made.append(make_trainer(folder, callbacks=list(callbacks), **changes))
        return made[-1]

    monkeypatch.setattr(train, "policy_for_training", lambda *args: {})
    args = make_trainer(folder).args
    return lambda line: train.train(None, args, None, trainer_class=make), made
