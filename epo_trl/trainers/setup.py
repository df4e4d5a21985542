"""Prepares a trainer before TRL's own set-up: checks the arguments, and loads tasks and rules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset

from epo_trl.envs.base import TaskSuite
from epo_trl.envs.pool import PooledSuite, PoolSettings
from epo_trl.errors import InputError
from epo_trl.methods import Comm, Methods
from epo_trl.models import load_tokenizer
from epo_trl.models.tiny import tiny_size
from epo_trl.trainers.checks import (
    check_arguments,
    check_half_precision,
    check_reference,
    check_sampling,
    check_test_tasks,
    check_tokenizer,
    check_train_tasks,
    listed_test_tasks,
    warn_empty_thought,
    warn_loss_scale,
)
from epo_trl.trainers.config import EPOConfig
from epo_trl.trainers.rules import RolloutRules, build_rules


@dataclass(frozen=True, slots=True)
class Setup:
    """Checked and complete arguments of a run.

    Args:
        suite: The task suite, in worker processes if configured.
        train_dataset: Rows with a task id as `prompt`.
        test_tasks: Task ids of each test list.
        tokenizer: The policy's tokenizer.
        rules: Rules of the episodes.
    """

    suite: TaskSuite
    train_dataset: Dataset
    test_tasks: dict[str, list[str]]
    tokenizer: Any
    rules: RolloutRules


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
    """Checks the arguments of an `EPOTrainer` and completes them.

    Args:
        model: Argument of the trainer.
        suite: Argument of the trainer.
        args: Argument of the trainer.
        methods: Methods of the run.
        train_dataset: Argument of the trainer.
        tokenizer: Argument of the trainer.
        reward_funcs: Argument of the trainer.
        kwargs: Other arguments of the trainer. Those that TRL would ignore are removed.

    Raises:
        ValueError: If a setting is invalid, would be overridden or leaves nothing to train on. The message names it.
    """
    check_arguments(kwargs)
    if train_dataset is None:
        train_dataset = Dataset.from_dict({"prompt": list(suite.task_ids("train"))})
    check_train_tasks(args, train_dataset, suite.name)
    test_tasks = listed_test_tasks(suite, args.eval_episodes)
    if args.eval_strategy != "no":
        check_test_tasks(test_tasks, suite.name)
    if isinstance(model, str) and tiny_size(model) and not Path(model).is_dir():
        raise InputError(
            f"model: expected a model, a Hub id or a path, got {model!r}. Only recipes and epo_trl.models.load_policy("
            f"ModelConfig({model!r}), ...) create it, with a tokenizer of the suite's words."
        )
    if tokenizer is None:
        tokenizer = load_tokenizer(model if isinstance(model, str) else model.config.name_or_path)
    check_tokenizer(tokenizer)
    check_reference(args, methods, model, kwargs.get("peft_config"))
    rules = build_rules(args, suite, tokenizer, methods.env_options)
    warn_loss_scale(args)
    check_sampling(args)
    check_half_precision(args)
    warn_empty_thought(args, rules.context)
    if (methods.may_replace_groups or methods.may_leave_out_groups) and reward_funcs is not None:
        raise InputError("reward_funcs: expected none with a method that selects groups by the episodes' own rewards")
    if methods.readers_of_turn_rewards and reward_funcs is not None:
        names = ", ".join(map(repr, methods.readers_of_turn_rewards))
        raise InputError(f"reward_funcs: expected none with {names}, which learns from the rewards of the turns")
    if args.env_workers:
        limits = (args.env_step_seconds, args.env_reset_seconds, args.env_reset_retries)
        suite = PooledSuite(suite, PoolSettings(args.env_workers, *limits))
    return Setup(suite, train_dataset, test_tasks, tokenizer, rules)


def make_comm(accelerator: Any) -> Comm:
    """Returns the communication between the processes of a run."""
    return Comm(
        sum=lambda tensor: accelerator.reduce(tensor.to(accelerator.device), reduction="sum").to(tensor.device),
        gather=gather_object,
        index=accelerator.process_index,
        count=accelerator.num_processes,
    )
