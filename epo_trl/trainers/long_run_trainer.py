"""TRL's GRPOTrainer for runs that take days: guards, pre-emption, whole checkpoints and exact resume."""

from __future__ import annotations

import math
import os
import shutil
import warnings
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from trl import GRPOTrainer

from epo_trl.trainers.checkpoint_files import (
    DiskFullError,
    damage,
    explain_full_disk,
    last_checkpoint,
    room_problem,
    rotate,
    seal,
)
from epo_trl.trainers.collected_batch import load_batch, save_batch
from epo_trl.trainers.config import EPOConfig
from epo_trl.trainers.model_card import OwnModelCard
from epo_trl.trainers.preemption import StopOnSigterm
from epo_trl.trainers.resume_check import differences, refusal, settings_of
from epo_trl.trainers.state_file import read_state, write_state
from epo_trl.trainers.update_guard import UpdateGuard, check_skipped

STATE_FILE = "epo_state.json"


class LongRunTrainer(OwnModelCard, GRPOTrainer):
    """Loses no more than the work since the last checkpoint, and goes on from it as if nothing had happened.

    What a subclass adds to the state of a run it says in `_run_state` and `_batch_state`.

    Args:
        args: The configuration.
        **kwargs: As for TRL.
    """

    args: EPOConfig

    def __init__(self, *, args: EPOConfig, **kwargs: Any) -> None:
        super().__init__(args=args, **kwargs)
        self._guard = UpdateGuard(args.max_skipped_updates, args.output_dir)
        self._settings: dict[str, Any] = {}
        self._train_sampler: Any = None
        self._sigterm = StopOnSigterm(self.accelerator)
        self.add_callback(self._sigterm)

    # --- What belongs to a checkpoint ---------------------------------------------------------------------------

    def _run_state(self) -> dict[str, Any]:
        """Returns what the run has come to, beside what TRL saves, as plain JSON types."""
        return {}

    def _load_run_state(self, state: dict[str, Any]) -> None:
        """Takes up what `_run_state` has returned."""

    def _batch_state(self) -> dict[str, Any]:
        """Returns what is needed to go on with the collected batch: TRL's buffer, in a subclass also its own sums."""
        return {"inputs": self._buffered_inputs}

    def _load_batch_state(self, state: dict[str, Any]) -> None:
        """Takes up what `_batch_state` has returned."""
        self._buffered_inputs = state["inputs"]

    # --- Training -----------------------------------------------------------------------------------------------

    @property
    def preempted(self) -> bool:
        """Whether the last `train` ended early, with a checkpoint, because of SIGTERM."""
        return self._sigterm.stopped

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as TRL does. On SIGTERM it saves a checkpoint after the step in progress, and returns.

        Args:
            resume_from_checkpoint: Path of a checkpoint, or `True` for the newest whole one in `output_dir`.
            *args: As for TRL.
            **kwargs: As for TRL.

        Raises:
            ValueError: If the checkpoint is damaged, or was made with other settings.
        """
        self._settings = settings_of(self)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"resume_from_checkpoint: got True, but {self.args.output_dir} has no whole checkpoint"
                )
        if resume_from_checkpoint:
            self._check_checkpoint(resume_from_checkpoint)
        with self._sigterm.listening():
            return super().train(resume_from_checkpoint or None, *args, **kwargs)

    def _check_checkpoint(self, checkpoint: str) -> None:
        wrong = damage(checkpoint)
        if wrong is not None:
            raise ValueError(f"resume_from_checkpoint: got {checkpoint}, where {wrong}; take an earlier checkpoint")
        saved = read_state(os.path.join(checkpoint, STATE_FILE))["settings"]
        lines = differences(saved, self._settings)
        if lines and not self.args.resume_with_changes:
            raise ValueError(refusal(checkpoint, lines))
        if lines:
            warnings.warn(f"{checkpoint} is resumed with other settings: {'; '.join(lines)}", stacklevel=3)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs one forward-backward pass; its loss is kept for the report of an update that is not finite."""
        output = super().training_step(model, inputs, num_items_in_batch)
        self._guard.add_loss(output)
        return output

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Returns the norm of the gradient; one that is not finite is not used for an update."""
        norm = super()._get_grad_norm(model, grad_norm)
        finite = math.isfinite(norm)
        if not finite and self.is_deepspeed_enabled:
            check_skipped(float(norm), lambda: self.accelerator.optimizer_step_was_skipped)
        elif not finite and self.accelerator.scaler is None:  # a scaler skips by itself, and needs the gradients
            model.zero_grad(set_to_none=True)
        losses = self._guard.end_update(skipped=not finite)
        self._metrics["train"]["guard/skipped_updates"] = [self._guard.skipped]
        if self._guard.exhausted:
            self._guard.stop(
                self.state.global_step, self.accelerator.process_index, float(norm), losses, self._buffered_inputs
            )
        return norm

    # --- Checkpoints --------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run_dir = self._get_output_dir(trial=trial)
        folder = os.path.join(run_dir, f"checkpoint-{self.state.global_step}")
        weights = sum(vars(p).get("ds_numel", p.numel()) * p.element_size() for p in self.model.parameters())
        problem = [room_problem(folder, weights) if self.accelerator.is_main_process else None]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(problem)
        if problem[0] is not None:
            raise DiskFullError(problem[0])
        try:
            self._write_checkpoint(model, trial, folder)
        except Exception as error:
            explain_full_disk(error, folder, weights)
            raise
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate(run_dir, self.args.save_total_limit, {folder, *([best] if best else [])})

    def _write_checkpoint(self, model: Any, trial: Any, folder: str) -> None:
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)  # the rest of one that was cut off here
        self.accelerator.wait_for_everyone()
        # TRL would delete the last whole checkpoint before this one is whole.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        if self._inside_rl_step:
            save_batch(folder, self.accelerator.process_index, self._batch_state())
        if self.args.should_save:
            write_state(
                os.path.join(folder, STATE_FILE),
                {
                    **self._run_state(),
                    "micro_step": self._step,
                    "skipped_updates": self._guard.skipped,
                    "settings": self._settings,
                },
            )
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            seal(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            state = read_state(os.path.join(checkpoint, STATE_FILE))
            self._load_run_state(state)
            self._guard.skipped = state["skipped_updates"]
            self._step = state["micro_step"]
            if self._inside_rl_step:
                self._resume_inside_rl_step(checkpoint)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Restores the trainer's state; the order of the tasks is made to go on where it was, too.

        Every epoch takes another order out of one generator, which a resumed run would start again.
        """
        epochs, steps = super()._init_training_state(*args, **kwargs)
        for _ in range(epochs):
            next(iter(self._train_sampler))
        return epochs, steps

    @property
    def _inside_rl_step(self) -> bool:
        return self._step % self.args.micro_steps_per_rl_step != 0

    def _resume_inside_rl_step(self, checkpoint: str) -> None:
        state = load_batch(checkpoint, self.accelerator.process_index, self.accelerator.device)
        found = torch.tensor(float(state is not None), device=self.accelerator.device)
        everywhere = bool(self.accelerator.reduce(found, reduction="sum") == self.accelerator.num_processes)
        if state is not None and everywhere:
            self._load_batch_state(state)
        else:  # other ranks than before, which was allowed: the rest of the RL step uses a batch of the new ones
            self._buffered_inputs = None
