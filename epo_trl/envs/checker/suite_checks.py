"""Checks of a suite's task lists."""

from __future__ import annotations

from epo_trl.envs.base import EnvError, TaskSuite
from epo_trl.envs.checker.results import failure, require


def check_task_suite(suite: TaskSuite) -> None:
    """Raises `EnvCheckError` if lists are empty, unstable or overlap, or if an unknown split name is accepted."""
    name = type(suite).__name__
    require(
        isinstance(getattr(suite, "name", None), str) and bool(suite.name),
        f"{name} has no name",
        'set the class attribute `name`, for example "my-game", which every reported number carries',
    )
    require(
        bool(suite.splits) and suite.splits[0] == "train",
        f"{name}.splits is {suite.splits!r}",
        'make it a tuple that begins with "train"',
    )
    owner: dict[str, str] = {}
    for split in suite.splits:
        ids = suite.task_ids(split)
        require(len(ids) > 0, f"{name} has no task in the split {split!r}", "remove the split from `splits` or fill it")
        require(
            list(ids) == list(suite.task_ids(split)),
            f"task_ids({split!r}) returned two different lists",
            "sort the ids or draw them from `random.Random(<fixed seed>)`; do not iterate over a set",
        )
        for task_id in ids:
            require(
                task_id not in owner or owner[task_id] == split == "train",
                f"the task id {task_id!r} occurs twice, in {owner.get(task_id)!r} and {split!r}",
                'begin ids with their split, for example "train/17"; only "train" may repeat one, as a weight',
            )
            owner[task_id] = split
    try:
        suite.task_ids("no such split")
    except EnvError:
        return
    raise failure(
        "task_ids('no such split') did not raise EnvError", "call `self.check_split(split)` first in task_ids"
    )
