"""What can be known to be wrong with the tasks of a run before the first of them is played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from epo_trl.envs.base import TaskSuite
from epo_trl.trainers.config import EPOConfig

TEST_SPLITS = ("iid", "ood")
# Arguments of TRL's trainer that have no place here, and what to do instead.
_NOT_TAKEN = {
    "eval_dataset": "evaluation plays the test lists of the suite, `task_ids('iid')` and `task_ids('ood')`",
    "rollout_func": "the trainer plays the suite's environments itself; override `play` to play them in another way",
    "environment_factory": "environments come from the suite (`make_env`): give it to a `ToolSuite` "
    "(docs/other_worlds.md)",
    "tools": "actions go to the suite's environment; make the tools methods of a class, for a `ToolSuite` "
    "(docs/other_worlds.md)",
}


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Raises `ValueError` for an argument of TRL's trainer that would be overruled; takes out those that are off."""
    for name, advice in _NOT_TAKEN.items():
        if kwargs.pop(name, None):
            raise ValueError(f"{name}: this trainer takes none; {advice}")


def check_train_tasks(args: EPOConfig, dataset: Any, suite: str) -> None:
    """Raises `ValueError` if there are no task ids, or too few of them for one RL step.

    Args:
        args: The configuration.
        dataset: What training draws from.
        suite: Its name, for the message.
    """
    takes = "a datasets.Dataset whose `prompt` column holds task ids, such as Dataset.from_dict({'prompt': [...]})"
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"train_dataset: got {type(dataset).__name__}, takes {takes}; of a stream, take a list of ids first"
        )
    if "prompt" not in dataset.column_names:
        raise ValueError(f"train_dataset: got the columns {dataset.column_names}, takes {takes}")
    needed = args.tasks_per_rl_step
    if len(dataset) < needed:
        raise ValueError(
            f"train_dataset: got {len(dataset)} tasks of {suite!r}, takes at least {needed}: one RL step plays "
            f"{args.generation_batch_size} episodes, num_generations={args.num_generations} of each task; give more "
            "tasks, raise num_generations, or lower per_device_train_batch_size or gradient_accumulation_steps"
        )
    if not isinstance(dataset[0]["prompt"], str):
        raise ValueError(f"train_dataset: got the prompt {dataset[0]['prompt']!r}, takes {takes}")


def listed_test_tasks(suite: TaskSuite, limit: int | None) -> dict[str, list[str]]:
    """Returns the first tasks of each test list that the suite has."""
    return {split: list(suite.task_ids(split))[:limit] for split in TEST_SPLITS if split in suite.splits}


def check_test_tasks(lists: Mapping[str, Sequence[str]], suite: str) -> None:
    """Raises `ValueError` if an evaluation would play nothing.

    Args:
        lists: The test lists by name.
        suite: The suite's name, for the message.
    """
    empty = [name for name, ids in lists.items() if not ids]
    if empty or not lists:
        found = f"its list {empty[0]!r} is empty" if empty else "it has no list 'iid' or 'ood'"
        raise ValueError(
            f"suite: got {suite!r} for an evaluation, but {found}; give it test tasks, leave an empty list out of "
            "`splits`, or set eval_strategy to 'no'"
        )
