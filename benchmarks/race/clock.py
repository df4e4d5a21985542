"""Times a run in seconds of CPU and of wall clock, and says when to save a checkpoint and when to stop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback


class Clock:
    """Measures training without the time that saving takes.

    Args:
        folder: Folder of the run. `steps.jsonl` gets one line per RL step, `at-NUMBER` a checkpoint.
        budget: CPU seconds of the run.
        marks: Number of checkpoints; the last is at the end of the budget.
        most: Number of RL steps after which the run ends, if the budget has not ended it.
    """

    def __init__(self, folder: Path, budget: float, marks: int, most: int) -> None:
        self.folder, self.most, self.due = folder, most, [budget * (i + 1) / marks for i in range(marks)]
        folder.mkdir(parents=True, exist_ok=True)
        self.steps = (folder / "steps.jsonl").open("w", encoding="utf-8")
        self.is_over, self._step, self._saving, self._start = False, 0, (0.0, 0.0), (0.0, 0.0)

    def start(self) -> None:
        """Starts the clock, when the trainer is built."""
        self._start = time.process_time(), time.perf_counter()

    def tick(self, wins: list[bool], save: Callable[[Path], Any], **more: float) -> None:
        """Ends an RL step.

        Args:
            wins: Whether each episode of the step was won.
            save: Saves the policy in a folder.
            **more: Other numbers of this step.
        """
        now = time.process_time(), time.perf_counter()
        cpu, wall = (now[i] - self._start[i] - self._saving[i] for i in (0, 1))
        self._step += 1
        row = {"step": self._step, "episodes": self._step * len(wins), "cpu": cpu, "wall": wall}
        self.steps.write(json.dumps({**row, "success": sum(wins) / len(wins), **more}) + "\n")
        self.steps.flush()
        self.is_over = cpu >= self.due[-1] or self._step >= self.most
        if cpu >= self.due[0] or self.is_over:
            while len(self.due) > 1 and cpu >= self.due[0]:
                self.due.pop(0)
            target = self.folder / f"at-{self._step * len(wins)}"
            save(target)
            (target / "clock.json").write_text(json.dumps(row), encoding="utf-8")
            after = time.process_time(), time.perf_counter()
            self._saving = self._saving[0] + after[0] - now[0], self._saving[1] + after[1] - now[1]


class TickTrainer(TrainerCallback):
    """Ticks the clock after every optimizer step, which is one RL step here.

    Args:
        clock: The clock.
        wins: Returns whether each episode of the last batch was won.
    """

    def __init__(self, clock: Clock, wins: Callable[[], list[bool]]) -> None:
        self.clock, self.wins = clock, wins

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clock."""
        self.clock.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends an RL step."""

        def save(folder: Path) -> None:
            kwargs["model"].save_pretrained(folder)
            kwargs["processing_class"].save_pretrained(folder)

        self.clock.tick(self.wins(), save)
        control.should_training_stop = self.clock.is_over
