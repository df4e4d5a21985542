"""The options of an evaluation, and the rules and lists that they define."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from epo_trl.bounds import Count, CountOrZero, OneOf, Share, option
from epo_trl.envs.base import TaskSuite
from epo_trl.errors import InputError
from epo_trl.evaluation import Protocol, get_protocol, protocol_names
from epo_trl.evaluation.play import sampled_tasks
from epo_trl.rollout.spec import ProtocolArguments, ResponseArguments

BACKENDS = ("transformers", "vllm")


@dataclass
class EvaluationArguments(ResponseArguments, ProtocolArguments):
    """Settings of an evaluation."""

    splits: list[str] = option(lambda: ["iid", "ood"], "Task lists to evaluate.")
    parallel: Count = option(64, "Number of episodes played in parallel.")
    max_episodes: Count | None = option(None, "Evaluate on a fixed random sample of N tasks of each list.")
    seed: int = option(0, "Seed of the sampling and of the environments.")
    backend: Annotated[str, OneOf(BACKENDS)] = option("transformers", "Generation backend: 'transformers' or 'vllm'.")
    vllm_gpu_memory_utilization: float = option(0.9, "Fraction of each GPU's memory that vLLM reserves.")
    trust_remote_code: bool = option(False, "Whether code of the model from the Hub or its folder may run.")
    output: str | None = option(None, "JSON file for the reports; partial results are stored next to it until the end.")
    compare_to: str | None = option(
        None, "Report of another policy on the same games; prints who won which, with McNemar's test."
    )
    max_aborted_share: Share = option(
        0.5,
        "Largest fraction of a list's episodes that environment errors may abort. Above it there is no report, and "
        "the same command replays the affected parts. 1 never stops.",
    )
    show_episodes: CountOrZero = option(0, "Number of episodes of each list to print.")
    keep_episodes: CountOrZero = option(
        20, "Number of episodes of each list to store next to the output for `epo-trl watch`."
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
    for split in args.splits:
        suite.check_split(split)
    lists = {split: sampled_tasks(suite, split, args.max_episodes) for split in args.splits}
    if not lists or not all(lists.values()):
        lengths = {split: len(suite.task_ids(split)) for split in suite.splits}
        raise InputError(
            f"splits: expected names of non-empty lists, got {args.splits} (max_episodes={args.max_episodes}); "
            f"{suite.name} has {lengths}"
        )
    return lists
