"""Resumable runs: one run per output folder, which may be interrupted and resumed, and which ends once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import Trainer

from epo_trl.changed import changed
from epo_trl.errors import InputError, differences
from epo_trl.runs.callbacks import ReturnFreedMemory, SaveEvaluated, StopOnSigterm, adapt_state, log_in_output_dir
from epo_trl.runs.files import FINISHED, STATE_FILE, flush, is_complete, read_state, rotate, write_state
from epo_trl.runs.run_lock import on_main_process, run_lock
from epo_trl.runs.run_settings import (
    check_checkpoint,
    configured_rates,
    load_settings,
    model_digest,
    newest_checkpoint,
    settings_of,
    warn_rounded_updates,
)


class LongRun(Trainer):
    """A mixin for TRL trainers: a run loses at most the work since the last checkpoint, and ends once.

    List it before TRL's trainer among the bases. `train` is TRL's with checks; `train_to_end` is a complete run, with
    its final model. The arguments are TRL's with `LongRunArguments`. Subclasses override `_run_state`,
    `_save_rank_state` and `_load_run_state` to save more.
    """

    args: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.load_settings = load_settings(self.model, self.args)
        self._settings: dict[str, Any] = {}  # see `settings_of`
        self._has_trained = False
        self._end_file = os.path.join(self.args.output_dir, FINISHED)
        self._end: dict[str, Any] = {}  # content of that file
        self._nothing_left = False
        self._sigterm = StopOnSigterm(self.accelerator)
        for callback in (self._sigterm, SaveEvaluated(), ReturnFreedMemory()):
            self.add_callback(callback)
        log_in_output_dir(self)

    @property
    def preempted(self) -> bool:
        """Whether `train` ended early, with a checkpoint, because of SIGTERM."""
        return self._sigterm.stopped

    def settings_of_data(self) -> dict[str, Any]:
        """Returns the settings of the data that affect the result, for the comparison on resume."""
        rows = (hashlib.sha256(json.dumps(row).encode()).hexdigest() for row in self.train_dataset)
        return {"train_data": model_digest(rows, "rows")}

    def _send_telemetry(self) -> None:
        """Lets TRL send telemetry only for a model or an adapter from the Hub: others make no network request."""
        name = getattr(self.model, "adapter_source", self.model.config.name_or_path)
        if name and not os.path.isdir(name):
            super()._send_telemetry()

    def _run_state(self) -> dict[str, Any]:
        """Returns the run's state that transformers does not save, as plain JSON types."""
        return {"settings": self._settings}

    def _save_rank_state(self, folder: str) -> None:
        """Writes this rank's own state into a checkpoint."""

    def _load_run_state(self, state: dict[str, Any], folder: str) -> None:
        """Restores a state returned by `_run_state`, and what `_save_rank_state` wrote into the folder."""

    def _load_tensors(self, path: str) -> dict[str, Any] | None:
        """Loads a file of plain containers of tensors, or returns `None` if it does not exist."""
        device = self.accelerator.device
        # With several processes it is `cpu:0`, to which torch cannot load.
        where = "cpu" if device.type == "cpu" else device
        return torch.load(path, map_location=where, weights_only=True) if os.path.isfile(path) else None

    # --- A complete run -----------------------------------------------------------------------------------------

    def train_to_end(self) -> None:
        """Starts or resumes the run of `output_dir`, saves the final model there, and uploads it with `push_to_hub`.

        A finished run stays as it is, and the trainer loads its last checkpoint. If the run stopped between its last
        step and the final save or the upload, only these are done.

        Raises:
            RunningError: If another process trains in the folder.
            ValueError: If the folder holds a run with other settings, or one that has finished without a checkpoint.
        """
        args = self.args
        with run_lock(args):
            newest, self._end = newest_checkpoint(args), on_main_process(args, self._read_end)
            if self._end and newest is None:
                raise InputError(
                    f"output_dir: expected a checkpoint in {args.output_dir}, where a run has finished, got none "
                    "(save_strategy: no); use its model, and another output_dir"
                )
            asked = args.resume_from_checkpoint
            is_own = asked and os.path.dirname(os.path.realpath(asked)) == os.path.realpath(args.output_dir)
            self.train(resume_from_checkpoint=asked if newest is None or is_own else newest)
            if self.preempted:
                return
            if not (self._end and self._nothing_left):
                self.save_model(_internal_call=True)
                self._write_end(step=self.state.global_step, settings=self._settings)
            elif args.process_index == 0:
                warnings.warn(
                    f"{args.output_dir} is finished, at step {self.state.global_step}: nothing is trained or written. "
                    "To continue training, raise max_steps and set resume_with_changes",
                    stacklevel=2,
                )
            place = [args.hub_model_id, args.hub_revision]
            if args.push_to_hub and self._end.get("uploaded") != place:
                self.push_to_hub()
                self._write_end(**{**self._end, "uploaded": place})

    def _read_end(self) -> dict[str, Any]:
        return read_state(self._end_file, "step", "settings") if os.path.exists(self._end_file) else {}

    def _write_end(self, **end: Any) -> None:
        self._end = end
        self.accelerator.wait_for_everyone()
        if self.args.process_index == 0:
            write_state(self._end_file, end)

    # --- Training -----------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as TRL does; on SIGTERM, saves a checkpoint after the current step and returns.

        From a checkpoint at the end of the run, it only loads the state.

        Args:
            resume_from_checkpoint: `True` for the newest complete checkpoint in `output_dir`, or a path: a run goes on
                from another run's checkpoint in a new folder, but never goes back or starts over in its own.

        Raises:
            RunningError: If another process trains in `output_dir`.
            ValueError: If this trainer has trained before, `output_dir` holds a run that does not begin with the
                checkpoint, or the checkpoint has other settings.
        """
        if self._has_trained:
            raise InputError("train: expected one call per trainer, got another; make a new trainer, also to resume")
        self._settings = settings_of(self)
        warn_rounded_updates(self)
        with run_lock(self.args), self._sigterm.listening():
            checkpoint = self._checkpoint(resume_from_checkpoint)
            self._has_trained = True
            handler, evaluate = self.callback_handler, self.args.eval_on_start and checkpoint is None
            with changed(self.args, eval_on_start=evaluate), changed(handler, callbacks=handler.callbacks):
                return super().train(checkpoint, *args, **kwargs)

    def _checkpoint(self, asked: str | bool | None) -> str | None:
        """Returns the checkpoint that is asked for, after its checks; `None` for a run that starts."""
        own, newest = self.args.output_dir, newest_checkpoint(self.args)
        checkpoint = newest if asked is True else asked or None
        if asked and checkpoint is None:
            raise InputError(f"resume_from_checkpoint: expected a complete checkpoint in {own}, got none")
        if newest is not None and os.path.realpath(checkpoint or "") != os.path.realpath(newest):
            raise InputError(
                f"resume_from_checkpoint: expected {newest}, from which the run in {own} goes on, got {checkpoint}; to "
                "go back or start over, use another output_dir"
            )
        if checkpoint is not None:
            check_checkpoint(self.args, checkpoint, self._settings)
        return checkpoint

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Restores the trainer's state; leaves no epoch for a run that has reached its last step."""
        done = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs)
        adapt_state(self, max_steps)
        best = os.path.join(self.args.output_dir, f"checkpoint-{self.state.best_global_step}")
        if os.path.isdir(best):  # the state has its path at the time, which moves with the folder
            self.state.best_model_checkpoint = best
        end = self._end  # a callback may have ended the run before max_steps
        last = end["step"] if end and not differences(end["settings"], self._settings) else max_steps
        self._nothing_left = self.state.global_step >= last
        if self._nothing_left:
            self.callback_handler.callbacks = []
            return num_train_epochs, 0
        if self.args.process_index == 0:
            Path(self._end_file).unlink(missing_ok=True)  # the run continues, so it is no longer finished
        return done

    # --- Checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> str:
        """Saves a checkpoint of this step, unless there is a complete one, and returns its folder. Collective."""
        self._save_checkpoint(self.model, trial=None)
        return os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        if on_main_process(self.args, partial(is_complete, folder)):
            return  # saved already, as at the end of an epoch
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)  # left by a save that was interrupted
        self.accelerator.wait_for_everyone()
        with self._without_rotation(upload=False):  # neither before this checkpoint is complete
            super()._save_checkpoint(model, trial)
        self._save_rank_state(folder)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            flush(folder)
            write_state(os.path.join(folder, STATE_FILE), self._run_state())
            rotate(self.args.output_dir, self.args.save_total_limit, self.state.best_model_checkpoint)
        if self.args.push_to_hub:
            self._push_from_checkpoint(folder)

    def _without_rotation(self, upload: bool = True) -> AbstractContextManager[None]:
        """Keeps transformers from deleting checkpoints, and without `upload` from uploading them."""
        return changed(self.args, save_total_limit=None, push_to_hub=self.args.push_to_hub and upload)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Ends training; keeps the last checkpoint, which transformers deletes beside the best with a limit of 1."""
        with self._without_rotation():
            return super()._finalize_training(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with configured_rates(self.optimizer, self.lr_scheduler):
                super()._load_optimizer_and_scheduler(checkpoint)
            self._load_run_state(read_state(os.path.join(checkpoint, STATE_FILE)), checkpoint)
