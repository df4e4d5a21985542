"""What all trainers of long runs share: one run to a folder, which is interrupted, gone on with, and ends once."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from epo_trl.long_runs.argument_check import check_deepspeed_runs
from epo_trl.long_runs.checkpoint_files import damage, last_checkpoint, step_of
from epo_trl.long_runs.main_process import on_main_process
from epo_trl.long_runs.preemption import StopOnSigterm
from epo_trl.long_runs.resume_check import differences, digest_of, not_kept, refusal, settings_of
from epo_trl.long_runs.run_lock import run_lock
from epo_trl.long_runs.state_file import read_state, write_state
from epo_trl.long_runs.whole_checkpoints import STATE_FILE, WholeCheckpoints

FINISHED = "_finished.json"  # in `output_dir`, written last
_READ_BY_TRANSFORMERS = ("global_step", "max_steps", "train_batch_size", "log_history")  # of its state in a checkpoint
_END: dict[str, type] = {"step": int, "settings": dict, "files": list}  # what it holds


@dataclass
class LongRunArguments:
    """How a run is gone on with."""

    resume_with_changes: bool = field(
        default=False,
        metadata={
            "help": "Go on from a checkpoint although the number of processes or a setting that changes the result is "
            "another now."
        },
    )
    trust_checkpoint: bool = field(
        default=False,
        metadata={
            "help": "Let resume_from_checkpoint name a folder outside of output_dir. For checkpoints of people you "
            "trust: those of DeepSpeed and FSDP are unpickled, which runs whatever code they hold."
        },
    )


class LongRun(WholeCheckpoints):
    """A base for trainers, before TRL's: loses no more than the work since the last checkpoint, and ends once.

    `train` is TRL's with checks; `train_to_end` is a whole run, with its final model. The arguments are TRL's with
    `LongRunArguments`.
    """

    args: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_deepspeed_runs(self.args, self.accelerator.distributed_type)
        self._verified: str | None = None  # a checkpoint whose contents were compared
        self._end_step: int | None = None
        self._nothing_left = False
        self._sigterm = StopOnSigterm(self.accelerator)
        self.add_callback(self._sigterm)

    @property
    def preempted(self) -> bool:
        """Whether the last `train` ended early, with a checkpoint, because of SIGTERM."""
        return self._sigterm.stopped

    def settings_of_data(self) -> dict[str, Any]:
        """Returns what decides the result beside configuration, model and ranks."""
        return {"train_data": self._data_digest}

    @cached_property
    def _data_digest(self) -> str:
        rows = (hashlib.sha256(json.dumps(row).encode()).hexdigest() for row in self.train_dataset)
        return digest_of(rows, "rows")

    def _send_telemetry(self) -> None:
        """Lets TRL report a run to huggingface.co only if its model is one of the Hub.

        A run of `tiny`, or of a model in a local folder, needs nothing from the network and asks it for nothing.
        """
        name = self.model.config.name_or_path
        if name and not os.path.isdir(name):
            super()._send_telemetry()

    # --- A whole run --------------------------------------------------------------------------------------------

    def train_to_end(self) -> None:
        """Starts the run of `output_dir`, or goes on with it, and saves the final model there.

        A run that has ended is left as it is: nothing is trained, evaluated, logged or written; the trainer gets its
        weights. If it was stopped between its last step and the final save, that alone is made up for.

        Raises:
            RunningError: If another process trains in the folder.
            ValueError: If the folder holds a run with other settings.
        """
        with run_lock(self.args):
            end = on_main_process(self.args, self._read_end)
            lines = [] if end is None else differences(end["settings"], settings_of(self))
            if lines and not self.args.resume_with_changes:
                raise ValueError(refusal(f"output_dir: the run in {self.args.output_dir} is finished; it", lines))
            if end is not None and not lines:
                self._load_finished(int(end["step"]))
                return
            checkpoint = self.args.resume_from_checkpoint or self.newest_checkpoint()
            if lines and checkpoint is None:
                raise ValueError(
                    f"resume_with_changes: got True, but the run in {self.args.output_dir} is finished and has no "
                    "whole checkpoint to go on from; take another output_dir"
                )
            self.train(resume_from_checkpoint=checkpoint)
            if not self.preempted:
                self.save_model(self.args.output_dir)
                on_main_process(self.args, self._write_end)

    def newest_checkpoint(self) -> str | None:
        """Returns the newest whole checkpoint in `output_dir`, or `None`. Collective."""
        self._verified = on_main_process(self.args, lambda: last_checkpoint(self.args.output_dir))
        return self._verified

    @property
    def _end_file(self) -> str:
        return os.path.join(self.args.output_dir, FINISHED)

    def _read_end(self) -> dict[str, Any] | None:
        """Returns step and settings of the run that has ended in `output_dir`, if its model is still there."""
        if not os.path.exists(self._end_file):
            return None
        try:
            end = read_state(self._end_file, *_END)
            if not all(isinstance(end[name], kind) for name, kind in _END.items()):
                raise ValueError(f"{self._end_file} is damaged")
        except ValueError as error:
            raise ValueError(
                f"output_dir: {error}; delete that file to resume from the newest checkpoint and save the final model "
                "again, or take another output_dir"
            ) from error
        there = all(os.path.exists(os.path.join(self.args.output_dir, str(name))) for name in end["files"])
        return end if there else None

    def _write_end(self) -> None:
        end = {"step": self.state.global_step, "settings": self._settings, "files": self._saved_files}
        write_state(self._end_file, end)

    def _load_finished(self, step: int) -> None:
        newest = self.newest_checkpoint()
        loaded = newest is not None and step_of(newest) == step
        without = "" if loaded else "; no checkpoint has its weights, so this trainer has those that it was made with"
        if self.args.process_index == 0:
            warnings.warn(
                f"{self.args.output_dir} is finished, at step {step}: nothing is trained or written{without}. To train "
                "on, raise max_steps and set resume_with_changes; to start anew, take another output_dir",
                stacklevel=3,
            )
        if loaded:
            self._end_step = step  # a callback may have ended it before max_steps
            self.train(resume_from_checkpoint=newest)

    # --- Training -----------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as TRL does. On SIGTERM it saves a checkpoint after the step in progress, and returns.

        From a checkpoint at the end of the run it loads the weights, and does nothing else.

        Args:
            resume_from_checkpoint: Path of a checkpoint in `output_dir`, or `True` for the newest whole one there.
            *args: As for TRL.
            **kwargs: As for TRL.

        Raises:
            RunningError: If another process trains in `output_dir`.
            ValueError: If the checkpoint is damaged, was made with other settings, or is not of this run.
        """
        self._settings = settings_of(self)
        with run_lock(self.args), self._sigterm.listening():
            checkpoint = self._checkpoint(resume_from_checkpoint)
            with self._only_what_is_left(checkpoint):
                output = super().train(checkpoint, *args, **kwargs)
            if self._nothing_left:
                self._load_rng_state(checkpoint)
            return output

    def _checkpoint(self, asked: str | bool | None) -> str | None:
        if asked is True:
            asked = self.newest_checkpoint()
            if asked is None:
                raise ValueError(
                    f"resume_from_checkpoint: got True, but {self.args.output_dir} has no whole checkpoint"
                )
        if not asked:
            return None
        checkpoint = os.fspath(asked)
        self._check_origin(checkpoint)
        self._check_contents(checkpoint)
        return checkpoint

    def _check_origin(self, checkpoint: str) -> None:
        own = os.path.realpath(self.args.output_dir)
        if os.path.commonpath([own, os.path.realpath(checkpoint)]) != own and not self.args.trust_checkpoint:
            raise ValueError(
                f"resume_from_checkpoint: expected a folder in output_dir ({self.args.output_dir}), got {checkpoint}: "
                "a checkpoint from another source can run code when it is loaded. Set trust_checkpoint to true if you "
                "trust who made this one"
            )

    def _check_contents(self, checkpoint: str) -> None:
        if checkpoint != self._verified:
            wrong = on_main_process(self.args, lambda: damage(checkpoint, contents=True))
            if wrong is not None:
                raise ValueError(f"resume_from_checkpoint: got {checkpoint}, where {wrong}; take an earlier checkpoint")
        try:
            saved = read_state(os.path.join(checkpoint, STATE_FILE), "settings")["settings"]
            read_state(os.path.join(checkpoint, TRAINER_STATE_NAME), *_READ_BY_TRANSFORMERS)
        except ValueError as error:
            raise ValueError(f"resume_from_checkpoint: {error}; take an earlier checkpoint") from error
        if (unknown := not_kept(saved, self._settings)) and self.args.process_index == 0:
            warnings.warn(f"{checkpoint} {unknown}", stacklevel=5)
        lines = differences(saved, self._settings)
        if lines and not self.args.resume_with_changes:
            raise ValueError(refusal(f"resume_from_checkpoint: {checkpoint}", lines))
        if lines:
            warnings.warn(f"{checkpoint} is resumed with other settings: {'; '.join(lines)}", stacklevel=5)

    @contextmanager
    def _only_what_is_left(self, checkpoint: str | None) -> Iterator[None]:
        """Leaves out what a resumed run has behind it: its first evaluation; if it had ended, all reports."""
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
        """Restores the trainer's state; no epoch is left for a run that had come to its last step."""
        done = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs)
        self._nothing_left = self.state.global_step >= (max_steps if self._end_step is None else self._end_step)
        if self._nothing_left:
            self.callback_handler.callbacks = []
            return num_train_epochs, 0
        if self.args.process_index == 0 and os.path.exists(self._end_file):
            os.remove(self._end_file)  # what is in the folder is not the end any more
        return done
