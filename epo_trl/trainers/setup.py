"""What a trainer is built from: checked arguments, tasks and rules, forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset

from epo_trl.bounds import copy_options
from epo_trl.changed import changed
from epo_trl.envs.base import TaskSuite, TextEnv
from epo_trl.envs.pool import PooledSuite
from epo_trl.errors import InputError
from epo_trl.evaluation import Protocol, get_protocol
from epo_trl.evaluation.play import check_first_task, protocol_context, protocol_settings, sampled_tasks
from epo_trl.methods import Methods, build_methods
from epo_trl.models.critic import detach_critic
from epo_trl.models.families import fitted
from epo_trl.models.load import check_output_dir, load_tokenizer, sequence_limit
from epo_trl.rollout import ContextBuilder, RolloutSettings
from epo_trl.rollout.demonstrations import few_shot_of
from epo_trl.runs.run_settings import uses_zero3
from epo_trl.scoring.turn_forward import Passes
from epo_trl.trainers.config import CPU_TOKENS, GPU_TOKENS, EPOConfig
from epo_trl.trainers.support import check_supported

TEST_SPLITS = ("iid", "ood")


@dataclass(frozen=True, slots=True)
class RolloutRules:
    """Rules of an episode in training, and in evaluation by the protocol."""

    context: ContextBuilder
    settings: RolloutSettings
    protocol: Protocol
    eval_context: ContextBuilder
    eval_settings: RolloutSettings

    def set_model_limits(self, max_context_tokens: int | None, end_ids: Sequence[int]) -> None:
        """Sets the maximum sequence length of the model and the tokens that end a response."""
        for context in (self.context, self.eval_context):
            context.max_context_tokens, context.end_ids = max_context_tokens, end_ids


def build_rules(
    args: EPOConfig, suite: TaskSuite, tokenizer: Any, env_options: Mapping[str, Any] | None = None
) -> RolloutRules:
    """Builds the rules of a configuration. Without a protocol, evaluation uses the rules of training.

    Few-shot examples (`few_shot`), played by the suite's expert, are the same in both, and the protocol's name
    identifies them. `env_options` are those of every `reset` in training.
    """
    protocol = (
        get_protocol(args.protocol)
        if args.protocol
        else Protocol(
            name=f"{suite.name}-{args.max_turns}turns",
            max_turns=args.max_turns,
            history_length=args.history_length,
            temperature=args.eval_temperature,
            invalid_action=args.invalid_action,
            context=args.context,
        )
    )
    shots = few_shot_of(args, suite, protocol.env_options)
    protocol = protocol.varied(few_shot=shots.label)
    return RolloutRules(
        args.build_context(suite, tokenizer, shots, args.context, args.history_length),
        copy_options(RolloutSettings, args, env_options=env_options or {}),
        protocol,
        protocol_context(protocol, args, suite, tokenizer, shots),
        protocol_settings(protocol, require_think=args.require_think),
    )


class Setup(NamedTuple):
    """Checked and complete arguments of a run."""

    methods: Methods
    suite: TaskSuite  # in worker processes if configured
    envs: list[TextEnv]
    train_dataset: Dataset  # with a task id as `prompt`
    test_tasks: dict[str, list[str]]  # by list
    tokenizer: Any
    rules: RolloutRules


def set_up(
    model: Any,
    suite: TaskSuite,
    args: EPOConfig,
    train_dataset: Dataset | None,
    tokenizer: Any,
    reward_funcs: Any,
    kwargs: dict[str, Any],
    critic: bool,
) -> Setup:
    """Checks the arguments of an `EPOTrainer` and completes them; removes those from `kwargs` that TRL would ignore.

    `critic` tells whether the trainer has one.

    Raises:
        InputError: If a setting is invalid, would be overridden or leaves nothing to train on. The message names it.
    """
    methods = build_methods(args, critic=critic)
    check_supported(args, model, methods, kwargs, reward_funcs)
    path = model if isinstance(model, str) else model.config.name_or_path
    check_output_dir(args.output_dir, path)
    if not isinstance(model, str):
        detach_critic(model)
    if train_dataset is None:
        train_dataset = Dataset.from_dict({"prompt": list(suite.task_ids("train"))})
    if len(train_dataset) < args.tasks_per_rl_step:
        raise InputError(
            f"train_dataset: expected at least {args.tasks_per_rl_step} tasks, those of one RL step, got "
            f"{len(train_dataset)} of {suite.name!r}. Add tasks, raise num_generations, or lower "
            "per_device_train_batch_size or gradient_accumulation_steps."
        )
    test_tasks = {
        split: sampled_tasks(suite, split, args.eval_episodes) for split in TEST_SPLITS if split in suite.splits
    }
    if args.eval_strategy != "no":
        check_test_tasks(test_tasks, suite.name)
    if tokenizer is None:
        if not path:
            raise InputError("processing_class: expected a tokenizer for a model that was created in memory, got none")
        tokenizer = load_tokenizer(path)
    if (adapter := kwargs.get("peft_config")) is not None:
        trust = {"trust_remote_code": args.trust_remote_code}
        kwargs["peft_config"] = fitted(adapter, model, dropout=not args.disable_dropout, **trust)
    compares_states = any(getattr(method, "anchor", "") == "state" for method in methods.values())
    rules = build_rules(args, suite, tokenizer, {"state_key": True} if compares_states else {})
    if args.env_workers:
        pooled: Any = PooledSuite(suite, args.env_workers, args.env_step_seconds)
        suite = pooled
    env = suite.make_env()
    check_first_task(env, train_dataset[0]["prompt"], args.seed, rules.context, rules.protocol)
    return Setup(methods, suite, [env], train_dataset, test_tasks, tokenizer, rules)


def check_test_tasks(lists: Mapping[str, Sequence[str]], suite: str) -> None:
    """Raises `InputError` if there is nothing to evaluate."""
    if not lists or not all(lists.values()):
        raise InputError(
            f"suite: expected test tasks for an evaluation, got {suite!r} with "
            f"{ {name: len(ids) for name, ids in lists.items()} } of them; add some, remove an empty list from "
            "`splits`, or set eval_strategy to 'no'"
        )


def check_context_fits(args: EPOConfig, context: ContextBuilder, model_config: Any) -> int | None:
    """Returns the model's maximum sequence length in tokens, or `None` if it has no limit.

    Raises:
        ValueError: If one turn (windowed), or `max_turns` responses after the first prompt (concatenated), cannot fit.
    """
    limits = {
        "max_position_embeddings": sequence_limit(model_config),
        "vllm_max_model_length": args.vllm_max_model_length if args.use_vllm else None,
    }
    known = {name: limit for name, limit in limits.items() if limit is not None}
    if not known:
        return None
    name = min(known, key=known.__getitem__)
    context.check_limit(name, known[name], 1 if context.is_windowed else args.max_turns)
    return known[name]


def divide(args: EPOConfig, model: Any, accelerator: Any) -> tuple[Passes, Passes]:
    """Returns the division of a batch into forward passes with gradient, and without; as many on every rank.

    With gradient checkpointing, ZeRO-3 reduces the gradients of an adapter in each pass, but expects each once.
    """

    def largest(count: int) -> int:
        if accelerator.num_processes == 1:
            return count
        of_all = torch.tensor(count, device=accelerator.device)
        torch.distributed.all_reduce(of_all, torch.distributed.ReduceOp.MAX)
        return int(of_all)

    tokens = args.tokens_per_pass or (CPU_TOKENS if accelerator.device.type == "cpu" else GPU_TOKENS)
    once = uses_zero3(args) and is_peft_model(model) and args.gradient_checkpointing
    passes = Passes() if once else Passes(tokens, args.recompute_passes, largest)
    return passes, Passes(tokens, agree=largest)


@contextmanager
def keeping_reference(trainer: Any, args: Any) -> Iterator[None]:
    """Makes TRL's `__init__` create its reference model for the methods, even without a KL term, and checks it.

    TRL creates one, or a copy of a loaded adapter, only if `beta` is not 0 at that point.

    Raises:
        InputError: If the reference model, which TRL loads from the policy's path, has other weights than the policy.
            Where DeepSpeed or FSDP may have sharded them, they are not compared.
    """
    beta = args.beta
    with changed(args, beta=beta or float(bool(trainer.methods.readers_of_reference))):
        yield
    trainer.beta = beta
    if trainer.ref_model is None or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return
    loaded = dict(trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters())
    for name, weight in trainer.model.named_parameters():
        if name not in loaded or not torch.equal(weight.to(loaded[name]), loaded[name]):
            raise InputError(
                f"model: expected the weights of its path {trainer.model.config.name_or_path!r}, from which the "
                f"reference model is loaded, got another {name}; save the model and pass its path, or use no reference"
            )
