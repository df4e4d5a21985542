"""Prints one short line per logging step instead of a dictionary of sixty numbers, which are all in TensorBoard."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

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
_UNLESS_ZERO = ("env/aborted",)


def short_line(step: int, logs: dict[str, Any]) -> str:
    """Formats the logs of a step as one line; `""` if there is nothing to show."""
    shown = [row for row in _TRAIN if logs.get(row[0]) is not None and (row[0] not in _UNLESS_ZERO or logs[row[0]])]
    parts = [f"{label} {form.format(logs[name])}" for name, label, form in shown]
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


def use_short_progress(trainer: Trainer) -> None:
    """Replaces the console callbacks of the trainer; a notebook's table stays as it is."""
    callbacks = [type(callback) for callback in trainer.callback_handler.callbacks]
    for old, new in ((ProgressCallback, ShortProgress), (PrinterCallback, ShortPrinter)):
        if old in callbacks:
            trainer.remove_callback(old)
            trainer.add_callback(new)
