"""The body of `recipes/sft.py` and `epo-trl sft`: supervised fine-tuning on episodes of a scripted expert."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from datasets import Dataset
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl import ModelConfig, SFTConfig, SFTTrainer

from epo_trl.bounds import Count, CountOrZero, Positive, Range, Share, check_bounds, option
from epo_trl.cli.base import progress_bar
from epo_trl.cli.options import CommandLine, parse_options
from epo_trl.envs.base import TaskSuite
from epo_trl.errors import InputError
from epo_trl.models import policy_for_training
from epo_trl.models.critic import causal_lm
from epo_trl.models.families import fitted, freeze_unread, settle_experts
from epo_trl.models.load import end_ids_of, sequence_limit
from epo_trl.models.muon import make_muon
from epo_trl.rollout.demonstrations import Demonstration, expert_episodes, few_shot_of
from epo_trl.rollout.spec import EpisodeArguments, PromptArguments
from epo_trl.rollout.templates import PromptTemplate
from epo_trl.runs.callbacks import EXIT_CODE
from epo_trl.runs.long_run import LongRun
from epo_trl.runs.run_lock import run_lock
from epo_trl.runs.run_settings import LongRunArguments, check_folder, check_training_arguments, shards_weights
from epo_trl.trainers.config import settle_defaults
from epo_trl.trainers.model_card import OwnModelCard


@dataclass
class DemonstrationArguments(PromptArguments, EpisodeArguments):
    """Episodes of the expert and their format."""

    episodes: Count = option(
        1000, "Number of expert episodes to play; failed ones are dropped unless keep_lost is set."
    )
    mistake_rate: Annotated[float, Range(least=0, below=1)] = option(
        0.0, "Fraction of turns with a deliberate mistake; mistakes are not used as labels."
    )
    keep_lost: bool = option(False, "Whether to keep episodes that end in failure, for an expert that guesses.")
    thoughts: bool = option(
        True, "Whether responses include the expert's thoughts. Without them, set require_think: false in RL."
    )
    prompt_label_rate: Share = option(
        0.0, "Weight of the loss on prompt tokens; useful for a model trained from scratch, else 0."
    )


def demonstrations(
    suite: TaskSuite, tokenizer: Any, args: DemonstrationArguments, seed: int, end_ids: Sequence[int] = ()
) -> Dataset:
    """Plays the expert and returns its successes, or with `keep_lost` all finished episodes, as `training_examples`.

    `seed` is that of the expert and of the prompt tokens that become labels; `end_ids` end a response of the policy, by
    default the tokenizer's end of sequence. Without a demonstration it raises `InputError`.
    """
    shots = few_shot_of(args, suite)
    context = args.build_context(suite, tokenizer, shots, args.context, args.history_length, end_ids=end_ids)
    ids = suite.demonstration_tasks("train", args.max_turns, args.episodes)
    tasks = [(ids[i % len(ids)], seed * args.episodes + i) for i in range(args.episodes if ids else 0)]
    with progress_bar(len(tasks), "expert episodes") as bar:
        rules = {name: getattr(args, name) for name in ("max_turns", "mistake_rate", "keep_lost", "thoughts")}
        episodes = expert_episodes(suite, tasks, context, **rules, on_episode=lambda won: bar.update())
        shown = [turns for turns in episodes if turns]
    if not shown:
        raise InputError(
            f"episodes: expected at least one demonstration, got none from {args.episodes}: the expert solved none "
            f"within max_turns ({args.max_turns}), or no prompt fits into max_prompt_length ({args.max_prompt_length})"
        )
    return training_examples(shown, args.context, args.prompt_label_rate, seed)


def training_examples(
    episodes: Iterable[Sequence[Demonstration]], context: str, prompt_label_rate: float = 0.0, seed: int = 0
) -> Dataset:
    """Converts episodes to rows of `input_ids` and `labels`: one per turn (windowed) or per episode (concatenated).

    A label is -100 except on responses, and on a share of the prompt tokens.
    """
    rng = random.Random(seed)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for turns in episodes:
        for sequence in [turns] if context == "concatenated" else [[turn] for turn in turns]:
            rows["input_ids"].append([i for turn in sequence for i in turn.input_ids])
            rows["labels"].append([i for turn in sequence for i in turn.labels(prompt_label_rate, rng)])
    return Dataset.from_dict(rows)


def demonstration_settings(suite: TaskSuite, shown: DemonstrationArguments) -> dict[str, Any]:
    """Returns what decides the demonstrations. RL compares the checksums of the prompts' texts with its own."""
    return {
        "suite": suite.name,
        "environment": dict(suite.settings),
        "template": PromptTemplate.load(shown.template_for(suite)).checksums(),
        "demonstrations": {f.name: getattr(shown, f.name) for f in fields(shown) if f.name != "prompt_template"},
    }


def describe_rows(count: int, shown: DemonstrationArguments) -> str:
    """Returns a number of training examples with its unit."""
    return f"{count} {'episodes' if shown.context == 'concatenated' else 'turns'}"


def check_length(rows: Dataset, limit: int | None, name: str = "max_length") -> None:
    """Raises `InputError` if a limit would cut demonstrations: a model trained on cut responses learns not to stop."""
    lengths = [len(row) for row in rows["input_ids"]]
    longer = sum(length > limit for length in lengths) if limit is not None else 0
    if longer:
        raise InputError(
            f"{name}: expected {max(lengths)} or more, got {limit}: {longer} of {len(lengths)} demonstrations are "
            "longer, and their responses would be truncated; reduce max_prompt_length or max_turns to shorten them"
        )


@dataclass
class ImitationConfig(LongRunArguments, SFTConfig):
    """TRL's configuration with settings for resuming an interrupted run, and Muon."""

    muon_learning_rate: Positive | None = option(
        None,
        "Learning rate of Muon for the hidden matrices, while AdamW trains the rest with learning_rate; by default "
        "AdamW trains everything. For a model trained from scratch, on one device or with DDP.",
    )
    gradient_checkpointing_above: CountOrZero | None = option(
        None,
        "Number of tokens in a micro-batch above which gradient checkpointing is used, instead of always or never. It "
        "bounds the memory of long episodes, and costs time for them only. Not with ZeRO-3 or FSDP.",
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        settle_defaults(self)
        super().__post_init__()
        if self.gradient_checkpointing_above is not None and shards_weights(self):
            raise InputError(
                "gradient_checkpointing_above: expected null with ZeRO-3 or FSDP, got "
                f"{self.gradient_checkpointing_above}: a rank with a longer micro-batch than the others would gather "
                "weights that they do not; set gradient_checkpointing instead"
            )
        check_training_arguments(self)


class EpochSeeded(Sampler[int]):
    """Samples rows grouped by length, in an order that depends on the seed and the epoch only.

    torch's global generator, from which the wrapped sampler draws, has no state of an epoch's start in a checkpoint.
    """

    def __init__(self, sampler: LengthGroupedSampler, seed: int, epoch: Callable[[], int]) -> None:
        self.sampler, self.seed, self.epoch = sampler, seed, epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        self.sampler.generator = torch.Generator().manual_seed(self.seed + self.epoch())
        return iter(self.sampler)


class ImitationTrainer(LongRun, OwnModelCard, SFTTrainer):
    """TRL's `SFTTrainer`, resumable like an RL run, with a model card that describes the demonstrations."""

    card_tags = ("trl", "sft")

    def __init__(
        self, suite: TaskSuite, shown: DemonstrationArguments, *, demonstrated: int | None = None, **kwargs: Any
    ) -> None:
        self.suite, self.shown = suite, shown
        self.demonstrated = len(kwargs["train_dataset"]) if demonstrated is None else demonstrated
        if (adapter := kwargs.get("peft_config")) is not None:
            trust = {"trust_remote_code": kwargs["args"].trust_remote_code}
            kwargs["peft_config"] = fitted(adapter, kwargs["model"], dropout=True, **trust)
        super().__init__(**kwargs)
        freeze_unread(causal_lm(self.model), quiet=self.args.process_index != 0)
        self.aux_loss_enabled &= settle_experts(self.model.config)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        sampler = super()._get_train_sampler(train_dataset)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return EpochSeeded(sampler, seed, lambda: int(self.state.epoch or 0))

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any) -> torch.Tensor:
        """Switches gradient checkpointing by the size of the micro-batch, if asked to."""
        limit = self.args.gradient_checkpointing_above
        if limit is not None and inputs["input_ids"].numel() > limit:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        elif limit is not None:
            self.model.gradient_checkpointing_disable()
        return super().training_step(model, inputs, *args)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Makes Muon if `muon_learning_rate` is set, else TRL's choice."""
        args = self.args
        if args.muon_learning_rate is not None and self.optimizer is None:
            if self.is_deepspeed_enabled or self.is_fsdp_enabled:
                got = args.muon_learning_rate
                raise InputError(f"muon_learning_rate: expected null with DeepSpeed or FSDP, got {got}")
            self.optimizer = make_muon(
                self.model,
                lr=args.learning_rate,
                matrix_lr=args.muon_learning_rate,
                weight_decay=args.weight_decay,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
            )
        return super().create_optimizer(model)

    def settings_of_data(self) -> dict[str, Any]:
        """Adds those of the demonstrations."""
        return {**super().settings_of_data(), **demonstration_settings(self.suite, self.shown)}

    def card_rows(self) -> dict[str, str]:
        """Returns the rows of the model card."""
        shown = self.shown
        kept = f"{describe_rows(self.demonstrated, shown)}, from {shown.episodes} expert episodes"
        return {
            "method": "imitation of a scripted expert (supervised fine-tuning)",
            "demonstrations": f"{kept} of up to {shown.max_turns} turns",
        }


def main(line: CommandLine) -> None:
    """Parses the options, plays the expert and trains. A finished run in `output_dir` is left unchanged."""
    imitate(*parse_options(line, DemonstrationArguments, ImitationConfig, ModelConfig))


def imitate(
    suite: TaskSuite, shown: DemonstrationArguments, args: ImitationConfig, model_args: ModelConfig
) -> ImitationTrainer:
    """Trains a warm start, resuming from the last checkpoint in `args.output_dir` if any, and returns the trainer.

    Saves the model and its tokenizer to `output_dir` as a Hub-style checkpoint. After a SIGTERM the run saves a
    checkpoint to resume from, and the program exits with code 143.

    Raises:
        RunningError: If another process trains in `output_dir`.
        ValueError: If `output_dir` holds a run with other settings, or there is no demonstration.
    """
    with run_lock(args):
        check_folder(args, demonstration_settings(suite, shown))
        policy = policy_for_training(model_args, args, suite, shown.template_for(suite))
        tokenizer = policy["processing_class"]
        ends = end_ids_of(model_args, tokenizer, args.trust_remote_code)
        rows = demonstrations(suite, tokenizer, shown, args.seed, ends)
        check_length(rows, args.max_length)
        trainer = ImitationTrainer(suite, shown, args=args, train_dataset=rows, **policy)
        check_length(rows, sequence_limit(trainer.model.config), "max_position_embeddings")
        trainer.train_to_end()
    if trainer.preempted:
        raise SystemExit(EXIT_CODE)
    return trainer
