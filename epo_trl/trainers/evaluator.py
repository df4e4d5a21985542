"""Evaluates the current policy on the fixed test lists."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epo_trl.errors import spelled
from epo_trl.evaluation import EvalReport
from epo_trl.evaluation.report import report_file
from epo_trl.methods import Comm
from epo_trl.rollout import RolloutTimes
from epo_trl.runs.files import write_state
from epo_trl.runs.run_settings import model_digest
from epo_trl.trainers.config import EPOConfig
from epo_trl.trainers.generation import PolicyEngine
from epo_trl.trainers.setup import RolloutRules, check_test_tasks
from epo_trl.types import Episode, StopReason


@dataclass(frozen=True)
class Evaluator:
    """Periodic evaluation. Its sampling has a separate seed and leaves the random state of training unchanged."""

    engine: PolicyEngine
    rules: RolloutRules
    tasks: Mapping[str, Sequence[str]]  # by list
    suite_name: str
    args: EPOConfig
    ranks: Comm

    def settings(self) -> dict[str, Any]:
        """Returns the settings that decide a success rate."""
        tasks = {split: model_digest(ids, "tasks") for split, ids in self.tasks.items()}
        return {"protocol": self.rules.protocol.rules(), "eval_seed": self.args.eval_seed, "test_tasks": tasks}

    def report(self, split: str, play: Callable[..., list[Episode]]) -> EvalReport:
        """Evaluates on one list and returns the report. Collective."""
        rank, world = self.ranks.index, self.ranks.count
        tasks = [(task_id, self.args.seed) for task_id in self.tasks[split]]
        local = tasks[rank::world]
        # In step, a part of the list plays together. Otherwise an environment plays the next task when it is free.
        size = self.args.per_device_eval_batch_size if self.engine.in_step else len(tasks)
        rounds = -(-len(tasks) // (size * world))
        times = RolloutTimes()
        episodes: list[Episode] = []
        with self.engine.sampling(self.rules.protocol.temperature, self.args.eval_seed + rank):
            for i in range(rounds):
                episodes += play(
                    local[i * size : (i + 1) * size],
                    context=self.rules.eval_context,
                    settings=self.rules.eval_settings,
                    description=f"evaluate {split} {i + 1}/{rounds}" if rounds > 1 else f"evaluate {split}",
                    times=times,
                )
        if world > 1:
            episodes = self.ranks.gather([episode.without_tokens() for episode in episodes])
        aborted = [episode for episode in episodes if episode.stop is StopReason.ABORTED]
        if aborted and rank == 0:
            message = (
                f"{len(aborted)} of {len(episodes)} episodes of {split!r} were aborted; they count as failures. The "
                f"first error: task {aborted[0].task_id!r}: {aborted[0].error}"
            )
            warnings.warn(spelled(message), stacklevel=2)
        return EvalReport.from_episodes(
            episodes,
            protocol=self.rules.protocol,
            suite=self.suite_name,
            split=split,
            seconds=times.generate + times.env + times.text,
        )

    def reports(self, play: Callable[..., list[Episode]], step: int) -> list[EvalReport]:
        """Evaluates on all lists, saves the reports in `output_dir/evaluations` and returns them. Collective.

        `play` is that of the trainer, `step` the number of optimizer steps of the policy.
        """
        check_test_tasks(self.tasks, self.suite_name)
        reports = [self.report(split, play) for split in self.tasks]
        if self.ranks.index == 0:
            content = {"step": step, "reports": [report.to_dict() for report in reports]}
            write_state(report_file(self.args.output_dir, step), content)
        return reports
