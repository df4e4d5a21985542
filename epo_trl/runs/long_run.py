"""Resumable runs: one run per output folder, which may be interrupted and resumed, and which ends once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from transformers.trainer import TRAINER_STATE_NAME, Trainer

from epo_trl.errors import InputError
from epo_trl.runs.callbacks import ReturnFreedMemory, SaveEvaluated, StopOnSigterm, adapt_state, log_in_output_dir
from epo_trl.runs.checkpoint_files import (
    FINISHED,
    MANIFEST,
    checkpoints,
    find_corruption,
    last_checkpoint,
    linked,
    put_in_place,
    rotate,
    set_aside,
    step_of,
    write_manifest,
)
from epo_trl.runs.disk_room import DiskRoom, full_size
from epo_trl.runs.run_lock import on_main_process, run_lock
from epo_trl.runs.run_settings import (
    check_deepspeed_runs,
    check_final_model,
    check_origin,
    configured_rates,
    differences,
    load_settings,
    model_digest,
    refusal,
    settings_of,
    warn_finished,
    warn_rounded_updates,
)
from epo_trl.runs.state_file import read_state, write_state
from epo_trl.runs.upload import may_be_hub_id, upload_model

STATE_FILE = "epo_state.json"  # in every checkpoint
SAVING = "_saving"  # in `output_dir`, while the final model is being written


class LongRun(Trainer):
    """A mixin for TRL trainers: a run loses at most the work since the last checkpoint, and ends once.

    List it before TRL's trainer among the bases. `train` is TRL's with checks; `train_to_end` is a complete run, with
    its final model. The arguments are TRL's with `LongRunArguments`. Incomplete checkpoints are ignored; a full disk
    corrupts none. Subclasses override `_run_state`, `_load_run_state` and `_save_rank_state` to save more.
    """

    args: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except ValueError as error:
            if "lora_dropout" not in str(error):
                raise
            raise InputError(
                "lora_dropout: expected 0 for an adapter on the packed experts of a mixture, got more; set it to 0, or "
                f"choose other layers with lora_target_modules ({error})"
            ) from error
        if self.args.deepspeed_plugin is not None:
            check_deepspeed_runs(self.accelerator.distributed_type)
        self.load_settings = load_settings(self.model, self.args)
        self._settings: dict[str, Any] = {}  # settings of the run, see `run_settings`
        self._saved_files: list[str] = []  # files of the final model, on the main process
        self._verified: str | None = None  # the newest checkpoint, if its contents were verified for this `train`
        self._branched_from: str | None = None  # an explicit checkpoint, relative to `output_dir`
        self._end_file = os.path.join(self.args.output_dir, FINISHED)
        self._end_step: int | None = None
        self._nothing_left = False
        self._sigterm = StopOnSigterm(self.accelerator)
        for callback in (self._sigterm, SaveEvaluated(), ReturnFreedMemory()):
            self.add_callback(callback)
        log_in_output_dir(self)

    @property
    def preempted(self) -> bool:
        """Whether the last `train` ended early, with a checkpoint, because of SIGTERM."""
        return self._sigterm.stopped

    def settings_of_data(self) -> dict[str, Any]:
        """Returns the settings of the data that affect the result, for the comparison on resume."""
        return {"train_data": self._data_digest}

    @cached_property
    def _data_digest(self) -> str:
        rows = (hashlib.sha256(json.dumps(row).encode()).hexdigest() for row in self.train_dataset)
        return model_digest(rows, "rows")

    def _send_telemetry(self) -> None:
        """Lets TRL send telemetry only for a model or an adapter from the Hub: others make no network request."""
        if may_be_hub_id(getattr(self.model, "adapter_source", self.model.config.name_or_path)):
            super()._send_telemetry()

    def _run_state(self) -> dict[str, Any]:
        """Returns the run's state that transformers does not save, as plain JSON types."""
        return {"settings": self._settings, "branched_from": self._branched_from}

    def _load_run_state(self, state: dict[str, Any]) -> None:
        """Restores a state returned by `_run_state`."""

    def _save_rank_state(self, folder: str) -> None:
        """Writes this rank's own state into a checkpoint."""

    def _bytes_of_weights(self) -> int:
        """Returns the size of the saved weights in bytes: the whole model, or the adapter."""
        parameters = [p for p in self.model.parameters() if p.requires_grad or not is_peft_model(self.model)]
        return sum(full_size(p) * p.element_size() for p in parameters)

    # --- A complete run -----------------------------------------------------------------------------------------

    def train_to_end(self) -> None:
        """Starts or resumes the run of `output_dir`, saves the final model there, and uploads it with `push_to_hub`.

        A finished run stays as it is: nothing is trained, evaluated, logged or written, and the trainer loads its
        weights. But it goes back to the path in `resume_from_checkpoint`, unless it was trained from there. If the run
        stopped between its last step and the final save or the upload, only these are done.

        Raises:
            RunningError: If another process trains in the folder.
            UploadError: If the upload fails. The same call uploads again.
            ValueError: If the folder holds a run with other settings.
        """
        with run_lock(self.args):
            end = on_main_process(self.args, self._read_end)
            lines = [] if end is None else differences(end["settings"], settings_of(self))
            if lines and not self.args.resume_with_changes:
                raise InputError(refusal(f"output_dir: the run in {self.args.output_dir} is finished; it", lines))
            if end is not None and not lines and self._is_of_asked_branch(end):
                self._upload(end)
                self._load_finished(end)
                return
            checkpoint = self._start()
            if lines and not checkpoint:
                raise InputError(
                    f"resume_with_changes: expected a complete checkpoint to resume from, got none: the run in "
                    f"{self.args.output_dir} is finished; use another output_dir"
                )
            self.train(resume_from_checkpoint=checkpoint)
            if end is not None and self._nothing_left:  # the changes or the checkpoint leave nothing to train
                warn_finished(self.args, self.state.global_step)
                self._upload(end)
            elif not self.preempted:
                self._save_final(Path(self.args.output_dir))
                end = {"step": self.state.global_step, "settings": self._settings, "files": self._saved_files}
                end["branched_from"] = self._branched_from
                if self.args.save_strategy == "no":  # else the last checkpoint has it
                    end["log_history"] = self.state.log_history
                on_main_process(self.args, lambda: write_state(self._end_file, end))
                self._upload(end)

    def _start(self) -> str | bool | None:
        """Returns the newest checkpoint, or `resume_from_checkpoint` if the newest one was not trained from it."""
        newest = self.newest_checkpoint()
        if newest and self._is_of_asked_branch(read_state(os.path.join(newest, STATE_FILE))):
            return newest
        if newest is None and not self.args.resume_from_checkpoint:
            on_main_process(self.args, self._check_not_all_damaged)
        self._verified = None
        return self.args.resume_from_checkpoint

    def _is_of_asked_branch(self, state: dict[str, Any]) -> bool:
        """Returns whether a checkpoint or an end was trained from `resume_from_checkpoint`, if that is a path."""
        asked = self.args.resume_from_checkpoint
        return not asked or asked is True or state.get("branched_from") == self._relative(asked)

    def _relative(self, checkpoint: str) -> str:
        return os.path.relpath(os.path.realpath(checkpoint), os.path.realpath(self.args.output_dir))

    def newest_checkpoint(self) -> str | None:
        """Returns the newest complete checkpoint in `output_dir`, or `None`. Collective."""
        self._verified = on_main_process(self.args, partial(last_checkpoint, self.args.output_dir))
        return self._verified

    def _check_not_all_damaged(self) -> None:
        """Raises `InputError` for a run without a complete checkpoint that once had one: it would start over."""
        found = checkpoints(self.args.output_dir)
        if len(found) > 1 or any((path / MANIFEST).is_file() for path in found):  # a kill leaves one without
            raise InputError(
                f"output_dir: expected a complete checkpoint to resume from, got {len(found)} damaged: {found[-1]}: "
                f"{find_corruption(found[-1], contents=True)}. Restore one, or delete them to start over"
            )

    def _read_end(self) -> dict[str, Any] | None:
        """Returns the step and settings of the finished run in `output_dir`, if its model still exists."""
        if not os.path.exists(self._end_file):
            return None
        try:
            end = read_state(self._end_file, "step", "settings", "files")
        except ValueError as error:
            raise InputError(
                f"output_dir: {error}; delete that file to resume from the newest checkpoint, or use another output_dir"
            ) from error
        is_complete = all(os.path.exists(os.path.join(self.args.output_dir, str(name))) for name in end["files"])
        return end if is_complete else None

    def _load_finished(self, end: dict[str, Any]) -> None:
        """Loads the last checkpoint of a finished run, or else the final model with its step and log."""
        newest, step = self.newest_checkpoint(), int(end["step"])
        warn_finished(self.args, step)
        if newest is None or step_of(newest) != step:
            check_final_model(self.args, step)
            self._load_from_checkpoint(self.args.output_dir)
            self.state.global_step, self.state.log_history = step, end.get("log_history", [])
            return
        self._end_step = step  # a callback may have ended the run before max_steps
        try:
            self.train(resume_from_checkpoint=newest)
        finally:
            self._end_step = None

    # --- Training -----------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as TRL does; on SIGTERM, saves a checkpoint after the current step and returns.

        From a checkpoint at the end of the run, it only loads the weights.

        Args:
            resume_from_checkpoint: Path of a checkpoint in `output_dir`, after which later ones there are renamed, or
                `True` for the newest complete one. Without it a run starts, and those of an earlier run are renamed.

        Raises:
            RunningError: If another process trains in `output_dir`.
            ValueError: If the checkpoint is damaged, has other settings, or belongs to another run.
        """
        self._settings = settings_of(self)
        warn_rounded_updates(self)
        with run_lock(self.args), self._sigterm.listening():
            self._branched_from = None
            checkpoint = self._checkpoint(resume_from_checkpoint) if resume_from_checkpoint else None
            if checkpoint is None and self.args.should_save:
                self._set_results_aside(0, None)
                set_aside(self.args.output_dir)
            self._verified = None
            with self._only_what_is_left(checkpoint):
                output = super().train(checkpoint, *args, **kwargs)
            if self._nothing_left:
                self._load_rng_state(checkpoint)
            return output

    def _checkpoint(self, asked: str | bool) -> str:
        """Returns the checkpoint that is asked for, after its checks."""
        own, checkpoint = self.args.output_dir, self.newest_checkpoint() if asked is True else str(asked)
        if checkpoint is None or not os.path.isdir(checkpoint):
            raise InputError(f"resume_from_checkpoint: expected a checkpoint in {own}, got {checkpoint or 'none'}")
        check_origin(self.args, checkpoint)
        self._check_contents(checkpoint)
        is_newest = checkpoint == self._verified
        saved = read_state(os.path.join(checkpoint, STATE_FILE))
        self._branched_from = saved.get("branched_from") if is_newest else self._relative(checkpoint)
        if self.args.should_save and not is_newest:
            self._set_aside(checkpoint)
        self.accelerator.wait_for_everyone()
        return checkpoint

    def _set_aside(self, checkpoint: str) -> None:
        """Renames what the run has saved after a checkpoint that it goes back to; checkpoints last."""
        step = read_state(os.path.join(checkpoint, TRAINER_STATE_NAME), "global_step")["global_step"]
        self._set_results_aside(step, checkpoint)
        set_aside(self.args.output_dir, step, checkpoint)

    def _set_results_aside(self, step: int, checkpoint: str | None) -> None:
        """Moves other results of steps after a checkpoint, or of an earlier run if it is `None`."""

    def _check_contents(self, checkpoint: str) -> None:
        if checkpoint != self._verified:
            wrong = on_main_process(self.args, lambda: find_corruption(checkpoint, contents=True))
            if wrong is not None:
                raise InputError(f"resume_from_checkpoint: got {checkpoint}, where {wrong}; use an earlier checkpoint")
        try:
            saved = read_state(os.path.join(checkpoint, STATE_FILE), "settings")["settings"]
        except ValueError as error:
            raise InputError(f"resume_from_checkpoint: {error}; use an earlier checkpoint") from error
        lines = differences(saved, self._settings)
        if lines and not self.args.resume_with_changes:
            raise InputError(refusal(f"resume_from_checkpoint: {checkpoint}", lines))
        if lines:
            warnings.warn(f"{checkpoint} is resumed with other settings: {'; '.join(lines)}", stacklevel=5)

    @contextmanager
    def _only_what_is_left(self, checkpoint: str | None) -> Iterator[None]:
        """Skips the first evaluation of a resumed run, and all callbacks of a finished one."""
        evaluate, callbacks = self.args.eval_on_start, list(self.callback_handler.callbacks)
        self.args.eval_on_start = evaluate and checkpoint is None
        self._nothing_left = False
        try:
            yield
        finally:
            self.args.eval_on_start = evaluate
            if self._nothing_left:
                self.callback_handler.callbacks = callbacks

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Restores the trainer's state; leaves no epoch for a run that has reached its last step."""
        done = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs)
        adapt_state(self, max_steps)
        self._nothing_left = self.state.global_step >= (max_steps if self._end_step is None else self._end_step)
        if self._nothing_left:
            self.callback_handler.callbacks = []
            return num_train_epochs, 0
        if self.args.process_index == 0 and os.path.exists(self._end_file):
            os.remove(self._end_file)  # the run continues, so it is no longer finished
        return done

    # --- Checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> str:
        """Saves a checkpoint of this step, unless there is a complete one, and returns its folder. Collective."""
        self._save_checkpoint(self.model, trial=None)
        return self._checkpoint_folder(None)

    def _checkpoint_folder(self, trial: Any) -> str:
        return os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = self._checkpoint_folder(trial)
        if on_main_process(self.args, partial(find_corruption, folder, contents=True)) is None:
            return  # saved already, as at the end of an epoch
        room = on_main_process(self.args, lambda: DiskRoom.for_checkpoint(folder, self._bytes_of_weights()))
        on_main_process(self.args, room.check)
        with room.explained():
            self._write_checkpoint(model, trial, folder)
        if self.args.should_save:
            rotate(os.path.dirname(folder), self.args.save_total_limit, {folder, self.state.best_model_checkpoint})
        if self.args.push_to_hub:  # it needs disk space too, so it comes after the rotation
            self._push_from_checkpoint(folder)

    def _write_checkpoint(self, model: Any, trial: Any, folder: str) -> None:
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)  # left by a save that was interrupted
        self.accelerator.wait_for_everyone()
        with self._without_rotation(upload=False):  # neither before this checkpoint is complete
            super()._save_checkpoint(model, trial)
        self._save_rank_state(folder)
        if self.args.should_save:
            write_state(os.path.join(folder, STATE_FILE), self._run_state())
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_manifest(folder)

    @contextmanager
    def _without_rotation(self, upload: bool = True) -> Iterator[None]:
        """Keeps transformers from deleting checkpoints, and without `upload` from uploading them."""
        limit, push = self.args.save_total_limit, self.args.push_to_hub
        self.args.save_total_limit, self.args.push_to_hub = None, push and upload
        try:
            yield
        finally:
            self.args.save_total_limit, self.args.push_to_hub = limit, push

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Ends training; keeps the last checkpoint, which transformers deletes beside the best with a limit of 1."""
        with self._without_rotation():
            return super()._finalize_training(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads the weights of a checkpoint, or the final model from `output_dir` without adapters of checkpoints."""
        if resume_from_checkpoint != self.args.output_dir:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        with linked(resume_from_checkpoint, read_state(self._end_file)["files"]) as folder:
            super()._load_from_checkpoint(folder, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with configured_rates(self.optimizer, self.lr_scheduler):
                super()._load_optimizer_and_scheduler(checkpoint)
            self._load_run_state(read_state(os.path.join(checkpoint, STATE_FILE)))

    # --- The final model ----------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model as transformers does; its files replace older ones once all are written.

        Raises:
            DiskFullError: If the disk is full. The folder keeps its previous files.
        """
        if _internal_call:  # for a checkpoint
            super().save_model(output_dir, _internal_call)
            return
        self._save_final(Path(output_dir if output_dir is not None else self.args.output_dir))
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_final(self, folder: Path) -> None:
        room = DiskRoom("the final model", str(folder / SAVING), self._bytes_of_weights())
        on_main_process(self.args, room.check)
        with room.explained():
            super().save_model(room.folder, _internal_call=True)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._saved_files = put_in_place(Path(room.folder), folder)

    def _upload(self, end: dict[str, Any]) -> None:
        """Uploads the final model of a finished run, if it is not there yet. Collective."""
        if self.args.push_to_hub:
            on_main_process(self.args, partial(self._upload_once, end))

    def _upload_once(self, end: dict[str, Any]) -> None:
        place = [str(self.hub_model_id), self.args.hub_revision]
        if end.get("uploaded") != place:
            upload_model(self.args, place[0], self.model.config.name_or_path if is_peft_model(self.model) else None)
            write_state(self._end_file, {**end, "uploaded": place})
