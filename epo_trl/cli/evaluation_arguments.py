"""The options of an evaluation, and the rules, lists and prompts that they define."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from epo_trl.bounds import Count, CountOrZero, OneOf, Share
from epo_trl.envs.base import TaskSuite
from epo_trl.errors import InputError
from epo_trl.evaluation import Protocol, get_protocol, protocol_names
from epo_trl.evaluation.play import protocol_context
from epo_trl.rollout import ContextBuilder
from epo_trl.rollout.chat_frame import template_settings
from epo_trl.rollout.few_shot import FewShot, FewShotArguments
from epo_trl.rollout.tool_calls import action_format

BACKENDS = ("transformers", "vllm")


@dataclass
class EvaluationArguments(FewShotArguments):
    """Settings of an evaluation."""

    protocol: str = field(
        default="", metadata={"help": "Name of the protocol; by default that of the environment, if it has one."}
    )
    max_turns: int | None = field(
        default=None, metadata={"help": "Overrides the turn limit of the protocol; the report's protocol records it."}
    )
    temperature: float | None = field(
        default=None, metadata={"help": "Overrides the temperature of the protocol; the report's protocol records it."}
    )
    context: str | None = field(
        default=None,
        metadata={
            "help": "Overrides the context of the protocol, 'windowed' or 'concatenated'; the report records it."
        },
    )
    splits: list[str] = field(default_factory=lambda: ["iid", "ood"], metadata={"help": "Task lists to evaluate."})
    prompt_template: str = field(default="alfworld", metadata={"help": "Same as in training."})
    max_prompt_length: int = field(default=2048, metadata={"help": "Maximum number of tokens per prompt."})
    max_completion_length: int = field(default=512, metadata={"help": "Maximum number of tokens per response."})
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Same as in training: settings of the chat template, such as '{\"enable_thinking\": false}'."
        },
    )
    action_format: str = field(default="tags", metadata={"help": "Same as in training."})
    require_think: bool = field(default=True, metadata={"help": "Same as in training."})
    parallel: Count = field(default=64, metadata={"help": "Number of episodes played in parallel."})
    max_episodes: Count | None = field(default=None, metadata={"help": "Evaluate only the first N tasks of each list."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling and of the environments."})
    backend: Annotated[str, OneOf(BACKENDS)] = field(
        default="transformers", metadata={"help": "Generation backend: 'transformers' or 'vllm'."}
    )
    vllm_gpu_memory_utilization: float = field(
        default=0.9, metadata={"help": "Fraction of each GPU's memory that vLLM reserves."}
    )
    output: str | None = field(
        default=None,
        metadata={"help": "JSON file for the reports; partial results are stored next to it until the end."},
    )
    compare_to: str | None = field(
        default=None,
        metadata={"help": "Report of another policy on the same games; prints who won which, with McNemar's test."},
    )
    max_aborted_share: Share = field(
        default=0.5,
        metadata={
            "help": "Largest fraction of a list's episodes that environment errors may abort. Above it there is no "
            "report, and the same command replays the affected parts. 1 never stops."
        },
    )
    show_episodes: CountOrZero = field(default=0, metadata={"help": "Number of episodes of each list to print."})
    keep_episodes: CountOrZero = field(
        default=20,
        metadata={"help": "Number of episodes of each list to store next to the output for `epo-trl watch`."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chat_template_kwargs = template_settings(self.chat_template_kwargs)


def load_protocol(args: EvaluationArguments, suite: TaskSuite) -> Protocol:
    """Returns the protocol with the overrides of the options, which its name then records."""
    name = args.protocol or suite.protocol
    if not name:
        raise InputError(
            f"protocol: expected one of {', '.join(map(repr, protocol_names()))}, or one that the environment's module "
            f"registers (docs/environments.md), got nothing; the environment {suite.name!r} has no default"
        )
    return get_protocol(name).varied(max_turns=args.max_turns, temperature=args.temperature, context=args.context)


def load_task_lists(args: EvaluationArguments, suite: TaskSuite) -> dict[str, list[str]]:
    """Returns the tasks to play from each list."""
    lists = {split: list(suite.task_ids(split))[: args.max_episodes] for split in args.splits}
    if not lists or not all(lists.values()):
        lengths = {split: len(suite.task_ids(split)) for split in suite.splits}
        raise InputError(
            f"splits: expected names of non-empty lists, got {args.splits} (max_episodes={args.max_episodes}); "
            f"{suite.name} has {lengths}"
        )
    return lists


def build_context(
    args: EvaluationArguments,
    suite: TaskSuite,
    protocol: Protocol,
    tokenizer: Any,
    longest: int | None,
    shots: FewShot,
) -> ContextBuilder:
    """Creates the builder of the prompts.

    Args:
        args: Template, lengths and action format of the prompts.
        suite: The tasks.
        protocol: The rules.
        tokenizer: Tokenizer of the policy.
        longest: Maximum sequence length of the policy, in tokens; `None` for no limit.
        shots: Example episodes before the first prompt.
    """
    return protocol_context(
        protocol,
        tokenizer,
        args.prompt_template,
        max_prompt_tokens=args.max_prompt_length,
        max_response_tokens=args.max_completion_length,
        max_context_tokens=longest,
        chat_template_kwargs=template_settings(args.chat_template_kwargs),
        examples=shots.examples,
        actions=action_format(args.action_format, tokenizer, suite.tools, verbatim=suite.verbatim),
    )
