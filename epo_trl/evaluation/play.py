"""Plays the episodes of an evaluation under a protocol."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from epo_trl.envs.base import TaskSuite, TextEnv
from epo_trl.envs.border import close_all
from epo_trl.envs.checker import check_first_turn
from epo_trl.errors import InputError
from epo_trl.evaluation.protocol import Protocol
from epo_trl.rollout import ContextBuilder, RolloutSettings, play_episodes
from epo_trl.rollout.context import TurnView
from epo_trl.rollout.few_shot import FewShot
from epo_trl.rollout.loop import Generate
from epo_trl.rollout.spec import ResponseArguments, copy_options
from epo_trl.types import Episode


def protocol_context(
    protocol: Protocol,
    options: ResponseArguments,
    suite: TaskSuite,
    tokenizer: Any,
    shots: FewShot | None = None,
    max_context_tokens: int | None = None,
) -> ContextBuilder:
    """Creates the builder of the prompts of a protocol.

    Args:
        protocol: The rules.
        options: Template, lengths and action format.
        suite: The tasks.
        tokenizer: Tokenizer of the policy.
        shots: Example episodes before the first prompt.
        max_context_tokens: Maximum sequence length of the policy, in tokens; `None` for no limit.

    Raises:
        ValueError: If the protocol prescribes another prompt template.
    """
    protocol.check_template(options.prompt_template)
    rules = protocol.context, protocol.history_length
    return options.build_context(suite, tokenizer, shots or FewShot(), *rules, max_context_tokens=max_context_tokens)


def protocol_settings(protocol: Protocol, *, require_think: bool = True) -> RolloutSettings:
    """Returns the rollout settings of a protocol."""
    return copy_options(RolloutSettings, protocol, require_think=require_think)


def check_first_task(env: TextEnv, task_id: str, seed: int, context: ContextBuilder, protocol: Protocol) -> None:
    """Checks before the evaluation that the first task starts and supports the protocol.

    Args:
        env: Environment of the task's suite.
        task_id: Id of the first task in the list.
        seed: Seed passed to `reset`.
        context: Builder of the prompts.
        protocol: Evaluation protocol.

    Raises:
        EnvError: If the environment does not start, or `info` lacks a field that the contract requires.
        TemplateError: If the template uses a field that the environment does not provide.
        ValueError: If the protocol needs a score and the environment has none, or the first prompt does not fit.
    """
    observation, info = check_first_turn(env, task_id, seed=seed, options=protocol.env_options)
    context.template.check(info)
    _check_first_prompt(context, TurnView(observation, info, history=()), task_id)
    if protocol.success_rule == "ended-with-score" and "score" not in info:
        raise InputError(
            f"protocol: expected one with the success rule 'won', since the environment has no score, got "
            f"{protocol.name!r}, which decides success by the score"
        )


def _check_first_prompt(context: ContextBuilder, view: TurnView, task_id: str) -> None:
    if context.build([view])[0] is not None:
        return
    (prompt,) = replace(context, max_prompt_tokens=sys.maxsize, max_context_tokens=None).build([view])
    assert prompt is not None
    needed, room = len(prompt.ids), context.max_prompt_tokens
    if needed > room:
        shown = ""
        if context.examples:
            (bare,) = replace(context, max_prompt_tokens=sys.maxsize, max_context_tokens=None, examples=()).build(
                [view]
            )
            assert bare is not None
            shown = f" {needed - len(bare.ids)} of them are the examples (few_shot); use fewer or shorter examples."
        raise InputError(
            f"max_prompt_length: expected at least {needed}, the number of tokens in the first prompt of task "
            f"{task_id!r}, got {room}.{shown} Later prompts are longer"
        )
    raise InputError(
        f"max_completion_length: expected a response that fits the model's {context.max_context_tokens} tokens with "
        f"the {needed} tokens of the first prompt of task {task_id!r}, got {context.max_response_tokens}"
    )


def split_chunks(task_ids: Sequence[str], size: int) -> list[Sequence[str]]:
    """Splits the list into chunks of `size` tasks; the last may have fewer."""
    return [task_ids[first : first + size] for first in range(0, len(task_ids), size)]


def play_chunks(
    suite: TaskSuite,
    chunks: Sequence[Sequence[str]],
    policy_for: Callable[[int], Generate],
    context: ContextBuilder,
    settings: RolloutSettings,
    *,
    seed: int = 0,
    on_finished: Callable[[int], None] = lambda count: None,
) -> Iterator[tuple[list[Episode], float]]:
    """Yields the episodes of each chunk, in order, with the wall time in seconds.

    Args:
        suite: Task suite.
        chunks: Lists of task ids; the tasks of a chunk are played in parallel.
        policy_for: Called with the number of each chunk; returns the policy for it.
        context: See `protocol_context`.
        settings: See `protocol_settings`.
        seed: Seed passed to every `reset`.
        on_finished: Called with the number of episodes that have ended since the last call.
    """
    envs: list[TextEnv] = [suite.make_env() for _ in range(max(map(len, chunks), default=0))]
    try:
        for number, task_ids in enumerate(chunks):
            start = time.perf_counter()
            tasks = [(task_id, seed) for task_id in task_ids]
            episodes = play_episodes(envs, tasks, policy_for(number), context, settings, on_finished=on_finished)
            yield episodes, time.perf_counter() - start
    finally:
        close_all(envs)
