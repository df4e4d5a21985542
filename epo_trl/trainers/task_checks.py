"""Checks of a run's tasks before the first one is played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from epo_trl.envs.base import TaskSuite
from epo_trl.errors import InputError
from epo_trl.trainers.config import EPOConfig

TEST_SPLITS = ("iid", "ood")
# Unsupported arguments of TRL's trainer, and what to do instead.
_UNSUPPORTED = {
    "eval_dataset": "evaluation uses the test lists of the suite, `task_ids('iid')` and `task_ids('ood')`",
    "rollout_func": "the trainer plays the suite's environments itself; override `play` to customize the rollout",
    "environment_factory": "environments come from the suite (`make_env`): give it to a `ToolSuite` "
    "(docs/other_worlds.md)",
    "tools": "actions go to the suite's environment; make the tools methods of a class, for a `ToolSuite` "
    "(docs/other_worlds.md)",
}


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Raises `InputError` for an unsupported argument of TRL's trainer; removes those that are not set."""
    for name, advice in _UNSUPPORTED.items():
        if kwargs.pop(name, None):
            raise InputError(f"{name}: expected none; {advice}")


def check_train_tasks(args: EPOConfig, dataset: Any, suite: str) -> None:
    """Raises `InputError` if there are no task ids, or too few for one RL step.

    Args:
        args: Configuration of the trainer.
        dataset: Training dataset.
        suite: Name of the suite, for the message.
    """
    expected = "a datasets.Dataset whose `prompt` column holds task ids, such as Dataset.from_dict({'prompt': [...]})"
    if not isinstance(dataset, Dataset):
        raise InputError(
            f"train_dataset: expected {expected}, got {type(dataset).__name__}. For a stream, make a list of ids first."
        )
    if "prompt" not in dataset.column_names:
        raise InputError(f"train_dataset: expected {expected}, got the columns {dataset.column_names}")
    needed = args.tasks_per_rl_step
    if len(dataset) < needed:
        raise InputError(
            f"train_dataset: expected at least {needed} tasks, got {len(dataset)} of {suite!r}. One RL step plays "
            f"{args.generation_batch_size} episodes, num_generations={args.num_generations} per task. Add tasks, raise "
            "num_generations, or lower per_device_train_batch_size or gradient_accumulation_steps."
        )
    if not isinstance(dataset[0]["prompt"], str):
        raise InputError(f"train_dataset: expected {expected}, got the prompt {dataset[0]['prompt']!r}")


def listed_test_tasks(suite: TaskSuite, limit: int | None) -> dict[str, list[str]]:
    """Returns the first `limit` tasks of each test list of the suite."""
    return {split: list(suite.task_ids(split))[:limit] for split in TEST_SPLITS if split in suite.splits}


def check_test_tasks(lists: Mapping[str, Sequence[str]], suite: str) -> None:
    """Raises `InputError` if there is nothing to evaluate.

    Args:
        lists: Test lists by name.
        suite: Name of the suite, for the message.
    """
    empty = [name for name, ids in lists.items() if not ids]
    if empty or not lists:
        found = f"its list {empty[0]!r} is empty" if empty else "it has no list 'iid' or 'ood'"
        raise InputError(
            f"suite: expected test tasks for an evaluation, got {suite!r}, but {found}. Add test tasks, remove an "
            "empty list from `splits`, or set eval_strategy to 'no'."
        )
