"""What makes the host wait for the device in an RL step, by place, and how much of it is ours."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import gpu
import pytest
import stand_in
from harness import table
from trainer_kit import make_ppo, make_trainer
from transformers import TrainerCallback

import epo_trl

pytestmark = pytest.mark.skipif(gpu.COUNT > 0, reason="the stand-in counts waits, a GPU does not")
OURS = Path(epo_trl.__file__).parent
LIBRARIES = ("trl", "transformers", "accelerate", "peft", "torch/optim", "torch/nn/utils")
MICRO_BATCHES = 4
# Functions that a phase runs in. Everything but the update runs inside the first micro-batch or the last one, so the
# order matters.
PHASES = {
    "_close_rl_step": "end of the RL step",
    "_generate_single_turn": "generation",
    "_generate_and_score_completions": "scoring",
    "training_step": "micro-batch",
}
RUNS = {
    "GRPO+EPO windowed": (make_trainer, {"epo_lambda": 0.1}),
    "GRPO+EPO concatenated, prefix cache": (make_trainer, {"epo_lambda": 0.1, "context": "concatenated"}),
    "PPO+EPO": (make_ppo, {"epo_lambda": 0.1}),
}


class ThirdStep(TrainerCallback):
    """Keeps the synchronisations of the third RL step: the first ones fill caches."""

    def __init__(self):
        self.stack = contextlib.ExitStack()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.seen = self.stack.enter_context(stand_in.synchronisations())

    def on_step_end(self, args, state, control, **kwargs):
        self.stack.close()


def phase(stack):
    if not stack:
        return "micro-batch"  # in the threads of the backward pass
    names = {name for _, _, name in stack}
    return next((own for name, own in PHASES.items() if name in names), "optimizer step")


def place(stack):
    """Returns the innermost line that is ours or a library's, and whether it is ours."""
    for file, line, _ in stack:
        path = Path(file)
        if path.is_relative_to(OURS):
            return f"`{path.relative_to(OURS)}:{line}`", True
        for library in LIBRARIES:
            if f"/site-packages/{library}/" in file:
                return f"{library}: `{file.partition(f'/site-packages/{library}/')[2]}:{line}`", False
    return "the backward pass" if not stack else f"`{stack[0][0]}:{stack[0][1]}`", False


def counted(folder, run, rows=2 * MICRO_BATCHES):
    """Returns how often the host waits in one RL step, by phase, kind, place and whether that is ours."""
    make, changes = RUNS[run]
    step = ThirdStep()
    trainer = make(
        folder, per_device_train_batch_size=rows // MICRO_BATCHES, gradient_accumulation_steps=MICRO_BATCHES,
        max_steps=3, bf16=True, max_grad_norm=1.0, callbacks=[step], **changes,
    )  # fmt: skip
    trainer.train()
    assert len(step.seen) > 0 and trainer.rl_step == 3
    return Counter((phase(one.stack), one.kind, *place(one.stack)) for one in step.seen)


def ours(counts, part):
    return sum(count for (where, _, _, own), count in counts.items() if own and where == part)


@pytest.fixture(scope="module", params=RUNS)
def run(request):
    return request.param


@pytest.fixture(scope="module")
def counts(run, tmp_path_factory):
    return counted(tmp_path_factory.mktemp("run"), run)


def test_the_table_of_synchronisations(run, counts, capsys):
    """Prints it, for CONTRIBUTING.md."""
    phases = Counter()
    for (where, _, _, own), count in counts.items():
        phases[where, own] += count
    totals = [[where, phases[where, True], phases[where, False]] for where in (*PHASES.values(), "optimizer step")]
    own = sorted([where, kind, at, count] for (where, kind, at, mine), count in counts.items() if mine)
    with capsys.disabled():
        print(f"\n\n{run}: one RL step of {MICRO_BATCHES} micro-batches of 2 episodes\n")
        print(table(["phase", "ours", "of the libraries"], totals))
        print("\n" + table(["phase", "kind", "ours", "in an RL step"], own))
    assert sum(map(sum, (row[1:] for row in totals))) == counts.total()


def test_a_micro_batch_waits_at_most_four_times_for_us(counts):
    assert ours(counts, "micro-batch") <= 4 * MICRO_BATCHES


def test_generation_does_not_wait_for_each_row(run, counts, tmp_path):
    """With four times the rows; the number of turns and of tokens is drawn, so a few more or less are no news."""
    many = counted(tmp_path, run, rows=8 * MICRO_BATCHES)
    assert ours(many, "generation") < 2 * max(ours(counts, "generation"), 1)
