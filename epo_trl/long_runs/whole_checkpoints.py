"""Saving: a checkpoint counts when it is whole, the final model appears at once, a full disk spoils neither."""

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
SAVING = "_saving"  # in `output_dir`, as long as the final model is written


class WholeCheckpoints(Trainer):
    """A base for trainers, before TRL's. What a subclass adds to a checkpoint it says in the methods to override."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings: dict[str, Any] = {}  # of the run, see `resume_check`
        self._saved_files: list[str] = []  # of the final model, on the main process

    def _run_state(self) -> dict[str, Any]:
        """Returns what the run has come to, beside what transformers saves, as plain JSON types."""
        return {}

    def _load_run_state(self, state: dict[str, Any]) -> None:
        """Takes up what `_run_state` has returned."""

    def _save_rank_state(self, folder: str) -> None:
        """Writes what belongs to this rank alone into a checkpoint."""

    def _bytes_of_weights(self) -> int:
        """Returns the size of the weights that are saved: all, or those of the adapter."""
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
            shutil.rmtree(folder, ignore_errors=True)  # the rest of one that was cut off here
        self.accelerator.wait_for_everyone()
        # TRL would delete the last whole checkpoint before this one is whole.
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
        """Saves the model as transformers does; its files take the place of older ones when all are written.

        Raises:
            DiskFullError: If there is no room. What was in the folder is as it was.
        """
        if _internal_call:  # of a checkpoint
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
    """Moves the files of one folder to another and removes it. Returns their names."""
    names = sorted(path.name for path in source.iterdir())
    for name in names:
        if (folder / name).is_dir():  # a checkpoint of DeepSpeed, if the weights were not gathered
            shutil.rmtree(folder / name)
        os.replace(source / name, folder / name)
    source.rmdir()
    return names
