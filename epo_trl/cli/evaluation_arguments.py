"""The options of an evaluation, and the rules and lists that they define."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from epo_trl.bounds import Count, CountOrZero, OneOf, Share
from epo_trl.envs.base import TaskSuite
from epo_trl.errors import InputError
from epo_trl.evaluation import Protocol, get_protocol, protocol_names
from epo_trl.rollout.spec import ProtocolArguments, ResponseArguments

BACKENDS = ("transformers", "vllm")


@dataclass
class EvaluationArguments(ResponseArguments, ProtocolArguments):
    """Settings of an evaluation."""

    splits: list[str] = field(default_factory=lambda: ["iid", "ood"], metadata={"help": "Task lists to evaluate."})
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
