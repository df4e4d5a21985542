"""SIGTERM, by which schedulers announce that they will take the machine: save a checkpoint, then stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback

EXIT_CODE = 128 + signal.SIGTERM  # what a shell reports of a program that SIGTERM ended


class StopOnSigterm(TrainerCallback):
    """Ends training after the optimizer step, or the evaluation, in which any rank got SIGTERM, with a checkpoint.

    Attributes:
        stopped: Whether it ended training before the last step. The same on all ranks.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.stopped = False
        self._received = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes SIGTERM over for the time of the block; in another thread than the main one nothing is taken over."""
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
        # A scheduler and a launcher may both send it, so more of them change nothing.
        self._received = True

    def _any_rank_received(self) -> bool:
        if self.accelerator.num_processes == 1:
            return self._received
        flag = torch.tensor(float(self._received), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, reduction="sum") > 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Asks for a checkpoint and the end, if any rank got the signal."""
        if state.global_step < state.max_steps and self._any_rank_received():
            control.should_save = control.should_training_stop = self.stopped = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The same; the step's checkpoint comes after its evaluation."""
        if state.global_step > 0:
            self.on_step_end(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Asks for the end only: what was just saved is the checkpoint."""
        if state.global_step < state.max_steps and self._any_rank_received():
            control.should_training_stop = self.stopped = True
