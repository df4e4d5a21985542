"""Callbacks of a run: SIGTERM saves a checkpoint and stops; one short line per logging step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState
from transformers.integrations.integration_utils import TensorBoardCallback, default_logdir
from transformers.trainer_callback import ExportableState

from epo_trl.devices import return_freed_memory

EXIT_CODE = 128 + signal.SIGTERM  # a shell reports it for a program ended by SIGTERM
# Columns of a line: (logged name, label, format).
_TRAIN = (
    ("env/success_rate", "success", "{:.0%}"),
    ("reward", "reward", "{:.2f}"),
    ("env/turns", "turns", "{:.1f}"),
    ("env/invalid_actions", "invalid", "{:.0%}"),
    ("env/aborted", "aborted", "{:.0%}"),
    ("entropy", "entropy", "{:.3f}"),
    ("grad_norm", "grad", "{:.2f}"),
    ("time/generate", "generate", "{:.1f}s"),
    ("time/update", "update", "{:.1f}s"),
)


class StopOnSigterm(TrainerCallback):
    """Saves a checkpoint and ends training after the optimizer step or evaluation in which a rank got SIGTERM.

    Attributes:
        stopped: Whether it ended training before the last step. The same on all ranks.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.stopped = False
        self._received = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles SIGTERM for the duration of the block; does nothing outside the main thread."""
        self.stopped = self._received = False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    def _note(self, *_: Any) -> None:
        self._received = True  # a scheduler and a launcher may both send it

    def _any_rank_received(self) -> bool:
        if self.accelerator.num_processes == 1:
            return self._received
        flag = torch.tensor(float(self._received), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, reduction="sum") > 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Requests a checkpoint and the end of training if any rank received the signal before the last step."""
        if state.global_step < state.max_steps and self._any_rank_received():
            control.should_training_stop = control.should_save = self.stopped = True

    on_evaluate = on_save = on_step_end  # a checkpoint that is complete is not saved again


class SaveEvaluated(TrainerCallback):
    """Saves a checkpoint of every evaluation where the best policy is loaded at the end, also of an additional one."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Requests the checkpoint."""
        control.should_save = control.should_save or args.load_best_model_at_end


class ReturnFreedMemory(TrainerCallback):
    """Returns the memory that a micro-batch or an optimizer step freed to the system."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Returns it after a micro-batch."""
        return_freed_memory(args.device)

    on_step_end = on_substep_end


def short_line(step: int, logs: dict[str, Any]) -> str:
    """Formats the logs of a step as one line instead of sixty numbers; `""` if there is nothing to show."""
    shown = {name: value for name, value in logs.items() if value is not None and (value or name != "env/aborted")}
    parts = [f"{label} {form.format(shown[name])}" for name, label, form in _TRAIN if name in shown]
    for name, value in logs.items():
        if name.endswith("/success_rate") and name.startswith("eval_"):
            split = name.removeprefix("eval_").removesuffix("/success_rate")
            low, high = (logs.get(f"{name}_{end}", value) for end in ("low", "high"))
            parts.append(f"{split} success {value:.1%} ({low:.1%} to {high:.1%})")
    return f"step {step:>4}  " + "  ".join(parts) if parts else ""


class ShortPrinter(TrainerCallback):
    """Short lines without a progress bar, for `disable_tqdm`."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Writes the line."""
        if state.is_world_process_zero and (line := short_line(state.global_step, logs or {})):
            tqdm.write(line)


class ShortProgress(ShortPrinter, ProgressCallback):
    """A progress bar with short lines as logs."""


def adapt_state(trainer: Trainer, max_steps: int) -> None:
    """Gives the state of a checkpoint the intervals and the callbacks of this run.

    When transformers saves a checkpoint, the state has to hold every callback that has a state.
    """
    trainer.state.compute_steps(trainer.args, max_steps)
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    stateful = [callback for callback in callbacks if isinstance(callback, ExportableState)]
    trainer.state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks


def log_in_output_dir(trainer: Trainer) -> None:
    """Sets TensorBoard's folder as `train` does, for an evaluation before it: the default is in the current folder."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
            callback.logging_dir = os.path.join(trainer.args.output_dir, default_logdir())


def use_short_progress(trainer: Trainer) -> None:
    """Replaces the console callbacks of the trainer; a notebook's table stays as it is."""
    callbacks = [type(callback) for callback in trainer.callback_handler.callbacks]
    for old, new in ((ProgressCallback, ShortProgress), (PrinterCallback, ShortPrinter)):
        if old in callbacks:
            trainer.remove_callback(old)
            trainer.add_callback(new)
