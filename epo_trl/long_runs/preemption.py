"""Saves a checkpoint and stops on SIGTERM, which schedulers send before they preempt a machine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback

EXIT_CODE = 128 + signal.SIGTERM  # a shell reports it for a program ended by SIGTERM


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
        # A scheduler and a launcher may both send it, so repeated signals have no effect.
        self._received = True

    def _any_rank_received(self) -> bool:
        if self.accelerator.num_processes == 1:
            return self._received
        flag = torch.tensor(float(self._received), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, reduction="sum") > 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Requests a checkpoint and the end of training if any rank received the signal."""
        if state.global_step < state.max_steps and self._any_rank_received():
            control.should_save = control.should_training_stop = self.stopped = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Does the same after an evaluation; the step's checkpoint follows it."""
        if state.global_step > 0:
            self.on_step_end(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Requests only the end of training: the checkpoint was just saved."""
        if state.global_step < state.max_steps and self._any_rank_received():
            control.should_training_stop = self.stopped = True
