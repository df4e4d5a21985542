"""Saves complete checkpoints and the final model atomically; a full disk corrupts neither."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from transformers import Trainer

from epo_trl.long_runs.checkpoint_files import rotate, seal
from epo_trl.long_runs.disk_room import DiskRoom
from epo_trl.long_runs.main_process import on_main_process
from epo_trl.long_runs.state_file import read_state, write_state

STATE_FILE = "epo_state.json"  # in every checkpoint
SAVING = "_saving"  # in `output_dir`, while the final model is being written


class WholeCheckpoints(Trainer):
    """A mixin to list before TRL's trainer; subclasses override its hooks to add state to a checkpoint."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings: dict[str, Any] = {}  # settings of the run, see `resume_check`
        self._saved_files: list[str] = []  # files of the final model, on the main process

    def _run_state(self) -> dict[str, Any]:
        """Returns the run's state that transformers does not save, as plain JSON types."""
        return {}

    def _load_run_state(self, state: dict[str, Any]) -> None:
        """Restores a state returned by `_run_state`."""

    def _save_rank_state(self, folder: str) -> None:
        """Writes this rank's own state into a checkpoint."""

    def _bytes_of_weights(self) -> int:
        """Returns the size of the saved weights in bytes: the whole model, or the adapter."""
        parameters = [p for p in self.model.parameters() if p.requires_grad or not is_peft_model(self.model)]
        return sum(vars(p).get("ds_numel", p.numel()) * p.element_size() for p in parameters)

    # --- Checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> str:
        """Saves a checkpoint of this step and returns its folder. Collective."""
        self._save_checkpoint(self.model, trial=None)
        return self._checkpoint_folder(None)

    def _checkpoint_folder(self, trial: Any) -> str:
        return os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = self._checkpoint_folder(trial)
        room = on_main_process(self.args, lambda: DiskRoom.for_checkpoint(folder, self._bytes_of_weights()))
        on_main_process(self.args, room.check)
        with room.explained():
            self._write_checkpoint(model, trial, folder)
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate(os.path.dirname(folder), self.args.save_total_limit, {folder, *([best] if best else [])})

    def _write_checkpoint(self, model: Any, trial: Any, folder: str) -> None:
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)  # left by a save that was interrupted
        self.accelerator.wait_for_everyone()
        # TRL would delete the last complete checkpoint before this one is complete.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self._save_rank_state(folder)
        if self.args.should_save:
            write_state(os.path.join(folder, STATE_FILE), {**self._run_state(), "settings": self._settings})
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            seal(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
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
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        room = DiskRoom("the final model", str(folder / SAVING), self._bytes_of_weights())
        on_main_process(self.args, room.check)
        with room.explained():
            super().save_model(room.folder, _internal_call=True)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._saved_files = _put_in_place(Path(room.folder), folder)
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


def _put_in_place(source: Path, folder: Path) -> list[str]:
    """Moves all files of a folder to another and removes the empty folder. Returns the file names."""
    names = sorted(path.name for path in source.iterdir())
    for name in names:
        if (folder / name).is_dir():  # a checkpoint of DeepSpeed, if the weights were not gathered
            shutil.rmtree(folder / name)
        os.replace(source / name, folder / name)
    source.rmdir()
    return names
