"""Checks that run before training starts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset
from trl import GRPOTrainer

from epo_trl.errors import InputError
from epo_trl.evaluation.report import SCALARS
from epo_trl.methods import Methods, Need
from epo_trl.models.load import load_tokenizer, sequence_limit
from epo_trl.models.prefix_cache import longrope_start
from epo_trl.rollout import ContextBuilder
from epo_trl.trainers.config import EPOConfig

TEST_SPLITS = ("iid", "ood")


def check_train_tasks(args: EPOConfig, dataset: Any, suite: str) -> None:
    """Raises `InputError` if there are no task ids, or too few for one RL step."""
    expected = "a datasets.Dataset whose `prompt` column holds task ids, such as Dataset.from_dict({'prompt': [...]})"
    if not isinstance(dataset, Dataset):
        raise InputError(
            f"train_dataset: expected {expected}, got {type(dataset).__name__}. For a stream, make a list of ids first."
        )
    if "prompt" not in dataset.column_names:
        raise InputError(f"train_dataset: expected {expected}, got the columns {dataset.column_names}")
    needed = args.tasks_per_rl_step
    if not len(dataset):
        raise InputError(
            f"train_dataset: expected at least {needed} tasks, got 0 of {suite!r}. Return task ids from "
            "task_ids('train')."
        )
    if len(dataset) < needed:
        raise InputError(
            f"train_dataset: expected at least {needed} tasks, got {len(dataset)} of {suite!r}. One RL step plays "
            f"{args.generation_batch_size} episodes, num_generations={args.num_generations} per task. Add tasks, raise "
            "num_generations, or lower per_device_train_batch_size or gradient_accumulation_steps."
        )
    if not isinstance(dataset[0]["prompt"], str):
        raise InputError(f"train_dataset: expected {expected}, got the prompt {dataset[0]['prompt']!r}")


def check_test_tasks(lists: Mapping[str, Sequence[str]], suite: str) -> None:
    """Raises `InputError` if there is nothing to evaluate."""
    empty = [name for name, ids in lists.items() if not ids]
    if empty or not lists:
        found = f"its list {empty[0]!r} is empty" if empty else "it has no list 'iid' or 'ood'"
        raise InputError(
            f"suite: expected test tasks for an evaluation, got {suite!r}, but {found}. Add test tasks, remove an "
            "empty list from `splits`, or set eval_strategy to 'no'."
        )


def check_best_metric(metric: str | None, lists: Mapping[str, Sequence[str]]) -> None:
    """Raises `InputError` if `metric_for_best_model` is no metric of a test list; transformers' default is the loss."""
    if metric is None:
        return
    split, _, name = metric.removeprefix("eval_").partition("/")
    if split not in lists or not (name in SCALARS or name.startswith("success_rate_")):
        raise InputError(
            f"metric_for_best_model: expected a metric of a test list, such as '{next(iter(lists))}/success_rate', got "
            f"{metric!r}"
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Raises `InputError` if the tokenizer cannot mark padding or the end of a turn."""
    for token in ("pad_token", "eos_token"):
        if getattr(tokenizer, token, None) is None:
            raise InputError(
                f"processing_class: expected a tokenizer with `{token}`, got none. Set one that is not used for "
                f"anything else, for example `tokenizer.{token} = '<|endoftext|>'` for a Qwen model."
            )


def check_reward_funcs(methods: Methods) -> None:
    """Raises `InputError` if a method reads rewards that TRL's reward functions would not change."""
    if methods.overriding("select"):
        raise InputError("reward_funcs: expected none with a method that selects groups by the episodes' own rewards")
    readers = [name for name, method in methods.items() if Need.TURN_REWARDS in method.needs]
    if readers := list(dict.fromkeys([*readers, *methods.overriding("turn_rewards")])):
        names = ", ".join(map(repr, readers))
        raise InputError(f"reward_funcs: expected none with {names}, which learns from the rewards of the turns")


def check_reference(args: EPOConfig, methods: Methods, model: Any, peft_config: Any) -> None:
    """Raises `InputError` if TRL has to load a reference model but the model has no path."""
    readers = methods.readers_of_reference
    if not (args.beta or readers) or isinstance(model, str) or peft_config is not None or is_peft_model(model):
        return
    if not model.config.name_or_path:
        raise _no_reference(args, methods, "this model was created in memory")


def check_reference_weights(trainer: Any) -> None:
    """Raises `InputError` if the policy was changed in memory, so that the reference model is another policy.

    They are compared in the reference's precision, unless DeepSpeed or FSDP may have sharded them.
    """
    if trainer.ref_model is None or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return
    loaded = dict(trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters())
    for name, weight in trainer.model.named_parameters():
        if name not in loaded or not torch.equal(weight.to(loaded[name]), loaded[name]):
            path = trainer.model.config.name_or_path
            raise _no_reference(trainer.args, trainer.methods, f"the {name} of this model differs from that in {path}")


def _no_reference(args: EPOConfig, methods: Methods, why: str) -> InputError:
    readers = methods.readers_of_reference
    slot = "credit" if args.credit in readers else "entropy_method"
    field = f"beta: got {args.beta}" if args.beta else f"{slot}: got {readers[0]!r}"
    return InputError(
        f"{field}, which loads the reference model from the policy's path, but {why}. Save the model and pass its "
        "path, or use no reference."
    )


def warn_nameless_base(args: EPOConfig) -> None:
    """Warns that a new adapter on a model created in memory cannot be loaded later."""
    if args.process_index == 0:
        warnings.warn(
            "peft_config: expected a model with a path, got one that was created in memory, so the saved adapter names "
            "no base model and cannot be loaded. Save the model and pass its path, or use policy_for_training",
            stacklevel=2,
        )


def warn_loss_scale(args: EPOConfig) -> None:
    """Warns about TRL losses whose scale changes when a sequence is an episode of several turns."""
    if args.process_index:
        return
    turn, tokens = args.max_completion_length, args.max_turns * args.max_completion_length
    if args.loss_type == "dr_grpo":
        warnings.warn(
            "loss_type: got 'dr_grpo', which divides the sum over an episode's tokens by max_completion_length "
            f"({turn}). Here that is the longest response of one turn, so policy loss and KL are up to max_turns "
            f"({args.max_turns}) times too large, and the entropy terms, which are means, are too small by the same "
            "factor. Use loss_type: dapo (a mean over tokens), or divide learning_rate and multiply epo_lambda by the "
            "number of turns of an episode.",
            stacklevel=2,
        )
    if args.loss_type == "luspo":
        warnings.warn(
            "loss_type: got 'luspo', which sums over an episode's tokens without a divisor. Policy loss and KL are "
            "larger than with loss_type: dapo by the number of tokens of an episode, up to max_turns * "
            f"max_completion_length ({tokens}), and the entropy terms, which are means, are too small by the same "
            "factor. Use loss_type: dapo, which weights tokens relative to each other as 'luspo' does, or multiply "
            "epo_lambda and max_grad_norm by the number of tokens of an episode.",
            stacklevel=2,
        )
    differ = args.updates_within_batch or args.use_vllm and args.vllm_importance_sampling_correction  # vLLM rounds
    if args.loss_type == "vespo" and differ and (weight := vespo_weight(args, tokens)) < 0.1:
        warnings.warn(
            "loss_type: got 'vespo', which weights an episode by the product of its tokens' ratios over all turns, up "
            f"to max_turns * max_completion_length ({tokens}) factors. An episode of that length whose tokens all have "
            f"a ratio of {_SOME_RATIO} has a weight of {weight:.0e} and gives no signal. Use loss_type: dapo, which "
            "clips each token's ratio, alone or with policy_method: gspo, which has one ratio per turn. Or make one "
            "update per batch (num_iterations: 1, steps_per_generation equal to gradient_accumulation_steps).",
            stacklevel=2,
        )


_SOME_RATIO = 0.95  # example of a token's ratio after an update


def vespo_weight(args: EPOConfig, tokens: int) -> float:
    """Returns TRL's weight of an episode with a positive advantage whose tokens all have the example ratio."""
    one = torch.ones(1, tokens)
    weight = GRPOTrainer.get_gamma_weights(
        one[:, :1], math.log(_SOME_RATIO) * one, one, None, k_pos=args.vespo_k_pos, lambda_pos=args.vespo_lambda_pos
    )
    return float(weight)


def check_context_fits(args: EPOConfig, context: ContextBuilder, model_config: Any) -> int | None:
    """Returns the model's maximum sequence length in tokens, or `None` if it has no limit.

    Warns if a sequence may become so long that LongRoPE rescales the tokens sampled before.

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
    turns = 1 if context.is_windowed else args.max_turns
    context.check_limit(name, known[name], turns)
    longest = min(known[name], turns * (context.max_prompt_tokens + context.max_response_tokens))
    start = longrope_start(model_config)
    if start is not None and longest > start and args.process_index == 0:
        warnings.warn(
            f"max_prompt_length, max_completion_length: expected at most original_max_position_embeddings = {start} "
            f"tokens in a sequence of this LongRoPE model, got up to {longest}. In a longer one the model rescales all "
            "positions, so the loss scores its first tokens under another policy than the one that sampled them. Lower "
            "them" + (", use context='windowed', or lower max_turns" if turns > 1 else ""),
            stacklevel=2,
        )
    return known[name]


def check_backbone(critic: str, model: Any) -> None:
    """Raises `InputError` if the policy has no separate transformer to build a critic on."""
    if model.base_model is model:
        raise InputError(
            f"critic: got {critic!r}, which needs a policy whose transformer is separate from its LM head, but "
            f"{type(model).__name__}.base_model is the model itself (base_model_prefix={model.base_model_prefix!r})"
        )


def check_critic_vocabulary(path: str, vocabulary_size: int, tokenizer: Any, **kwargs: Any) -> None:
    """Raises `InputError` if a critic cannot read the policy's tokens.

    Args:
        path: Value of `critic_model_name_or_path`.
        vocabulary_size: Number of rows of the critic's embedding.
        tokenizer: The policy's tokenizer.
        **kwargs: Passed on to the loading of the critic's tokenizer.
    """
    needed = len(tokenizer)
    if vocabulary_size < needed:
        raise InputError(
            f"critic_model_name_or_path: expected a model with the policy's tokenizer ({needed} tokens), got {path!r} "
            f"with a vocabulary of {vocabulary_size} tokens"
        )
    try:
        own = load_tokenizer(path, **kwargs)
    except (OSError, ValueError) as error:
        raise InputError(
            f"critic_model_name_or_path: expected a model saved with its tokenizer, got {path!r}, whose tokenizer "
            f"cannot be read ({error}). It must be the policy's tokenizer."
        ) from error
    if own.get_vocab() != tokenizer.get_vocab():
        raise InputError(
            f"critic_model_name_or_path: expected a model with the policy's tokenizer, got {path!r}, whose tokenizer "
            "gives the same text other ids"
        )
