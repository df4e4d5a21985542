"""What a trainer needs before TRL's own set-up: checked arguments, tasks, rules and methods."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset

from epo_trl.envs.base import TaskSuite
from epo_trl.envs.pool import PooledSuite, PoolSettings
from epo_trl.methods import Methods, Ranks
from epo_trl.models import load_tokenizer
from epo_trl.models.tiny import tiny_size
from epo_trl.trainers.checks import check_reference, check_settings, check_tokenizer
from epo_trl.trainers.config import EPOConfig
from epo_trl.trainers.rules import Rules, rules_of
from epo_trl.trainers.task_checks import check_arguments, check_test_tasks, check_train_tasks, listed_test_tasks


@dataclass(frozen=True, slots=True)
class Setup:
    """A run's arguments, with nothing left open.

    Args:
        suite: Of the tasks, in worker processes if that was asked for.
        train_dataset: Rows with a task id as `prompt`.
        test_tasks: Task ids of each test list.
        tokenizer: The policy's.
        rules: How episodes are played.
    """

    suite: TaskSuite
    train_dataset: Dataset
    test_tasks: dict[str, list[str]]
    tokenizer: Any
    rules: Rules

    def test_datasets(self) -> dict[str, Dataset] | None:
        """Returns the test lists as TRL takes them."""
        return {split: Dataset.from_dict({"prompt": ids}) for split, ids in self.test_tasks.items()} or None


def set_up(
    model: Any,
    suite: TaskSuite,
    args: EPOConfig,
    methods: Methods,
    train_dataset: Dataset | None,
    tokenizer: Any,
    reward_funcs: Any,
    kwargs: dict[str, Any],
) -> Setup:
    """Returns the set-up of an `EPOTrainer`.

    Args:
        model: As for the trainer.
        suite: As for the trainer.
        args: As for the trainer.
        methods: What the policy learns by.
        train_dataset: As for the trainer.
        tokenizer: As for the trainer.
        reward_funcs: As for the trainer.
        kwargs: The trainer's other arguments; those that TRL would get in vain are taken out.

    Raises:
        ValueError: If something would train on nothing, be overruled or make no sense; the message names the field.
    """
    check_arguments(kwargs)
    if train_dataset is None:
        train_dataset = Dataset.from_dict({"prompt": list(suite.task_ids("train"))})
    check_train_tasks(args, train_dataset, suite.name)
    test_tasks = listed_test_tasks(suite, args.eval_episodes)
    if args.eval_strategy != "no":
        check_test_tasks(test_tasks, suite.name)
    if isinstance(model, str) and tiny_size(model) and not Path(model).is_dir():
        raise ValueError(
            f"model: got {model!r}, which only recipes and epo_trl.models.load_policy(ModelConfig({model!r}), ...) "
            "make, with a tokenizer of the suite's words; takes a model, a Hub id or a path"
        )
    if tokenizer is None:
        tokenizer = load_tokenizer(model if isinstance(model, str) else model.config.name_or_path)
    check_tokenizer(tokenizer)
    check_reference(args, methods, model, kwargs.get("peft_config"))
    rules = rules_of(args, suite, tokenizer)
    check_settings(args, rules.context)
    if methods.choose_groups and reward_funcs is not None:
        raise ValueError("reward_funcs: takes none with a method that chooses groups by the episodes' own rewards")
    if methods.readers_of_turn_rewards and reward_funcs is not None:
        names = ", ".join(map(repr, methods.readers_of_turn_rewards))
        raise ValueError(f"reward_funcs: takes none with {names}, which learns from the rewards of the turns")
    return Setup(_in_workers(suite, args), train_dataset, test_tasks, tokenizer, rules)


def ranks_of(accelerator: Any) -> Ranks:
    """Returns the processes of a run as methods and the other parts see them."""
    return Ranks(
        sum=lambda tensor: accelerator.reduce(tensor.to(accelerator.device), reduction="sum").to(tensor.device),
        gather=gather_object,
        index=accelerator.process_index,
        count=accelerator.num_processes,
    )


def _in_workers(suite: TaskSuite, args: EPOConfig) -> TaskSuite:
    """Returns the suite as `env_workers` wants it played."""
    if not args.env_workers:
        return suite
    limits = (args.env_step_seconds, args.env_reset_seconds, args.env_reset_retries)
    return PooledSuite(suite, PoolSettings(args.env_workers, *limits))
