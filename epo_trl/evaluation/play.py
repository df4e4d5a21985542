"""How a protocol is played."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from epo_trl.envs.base import TaskSuite, TextEnv
from epo_trl.envs.border import close_all
from epo_trl.envs.checker import check_first_turn
from epo_trl.evaluation.protocol import Protocol
from epo_trl.rollout import ContextBuilder, PromptTemplate, RolloutSettings, play_episodes
from epo_trl.rollout.context import TurnView
from epo_trl.rollout.examples import Example
from epo_trl.rollout.loop import Generate
from epo_trl.rollout.parsing import ActionFormat, TaggedActions
from epo_trl.types import Episode


def protocol_context(
    protocol: Protocol,
    tokenizer: Any,
    template: str,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    max_context_tokens: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    examples: Sequence[Example | str] = (),
    actions: ActionFormat | None = None,
) -> ContextBuilder:
    """Builds the protocol's prompts.

    Raises:
        ValueError: If the protocol prescribes another prompt template.
    """
    protocol.check_template(template)
    return ContextBuilder(
        tokenizer,
        PromptTemplate.load(template),
        mode=protocol.context,
        history_length=protocol.history_length,
        max_prompt_tokens=max_prompt_tokens,
        max_context_tokens=max_context_tokens,
        max_response_tokens=max_response_tokens,
        chat_template_kwargs=chat_template_kwargs or {},
        examples=examples,
        actions=actions or TaggedActions(),
    )


def protocol_settings(protocol: Protocol, *, require_think: bool = True) -> RolloutSettings:
    """Returns the protocol's rules."""
    return RolloutSettings(
        max_turns=protocol.max_turns,
        invalid_action=protocol.invalid_action,
        require_think=require_think,
        success_rule=protocol.success_rule,
        env_options=protocol.env_options,
    )


def check_first_task(env: TextEnv, task_id: str, seed: int, context: ContextBuilder, protocol: Protocol) -> None:
    """Fails before anything is played if the environment does not start, or lacks what will be asked of it.

    Args:
        env: Of the task's suite.
        task_id: The first task that will be played.
        seed: Handed to `reset`.
        context: What builds the prompts.
        protocol: The rules.

    Raises:
        EnvError: If the environment does not start, or `info` lacks what the contract asks for.
        TemplateError: If the template shows what the environment does not give.
        ValueError: If the protocol goes by a score and the environment keeps none, or the first prompt does not fit.
    """
    observation, info = check_first_turn(env, task_id, seed=seed, options=protocol.env_options)
    context.template.check(info)
    _check_first_prompt(context, TurnView(observation, info, history=()), task_id)
    if protocol.success_rule == "ended-with-score" and "score" not in info:
        raise ValueError(
            f"protocol: got {protocol.name!r}, which calls an episode solved by its score, and the environment keeps "
            "none; takes a protocol whose success rule is 'won'"
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
            shown = f" {needed - len(bare.ids)} of them are the examples (few_shot); fewer or shorter ones help too."
        raise ValueError(
            f"max_prompt_length: got {room}, takes at least {needed}: so many tokens has the first prompt of the task "
            f"{task_id!r}, and without it an episode has no turn.{shown} Later prompts are longer"
        )
    raise ValueError(
        f"max_completion_length: got {context.max_response_tokens}, with which the {needed} tokens of the first prompt "
        f"of the task {task_id!r} are more than the {context.max_context_tokens} that the model takes"
    )


def play_split(
    suite: TaskSuite,
    task_ids: Sequence[str],
    generate: Generate,
    context: ContextBuilder,
    protocol: Protocol,
    *,
    seed: int = 0,
    parallel: int = 64,
    require_think: bool = True,
    on_finished: Callable[[int], None] = lambda count: None,
) -> tuple[list[Episode], float]:
    """Returns one episode per task, in order, and the seconds it took.

    Args:
        suite: Where the tasks come from.
        task_ids: A whole list.
        generate: The policy, at the protocol's temperature.
        context: See `protocol_context`.
        protocol: The rules.
        seed: Handed to every `reset`.
        parallel: Episodes that are played side by side.
        require_think: Whether a response without reasoning is invalid.
        on_finished: Called with the number of episodes that have ended since the last call.
    """
    settings = protocol_settings(protocol, require_think=require_think)
    chunks = chunks_of(task_ids, parallel)
    played = play_chunks(suite, chunks, lambda _: generate, context, settings, seed=seed, on_finished=on_finished)
    results = list(played)
    return [episode for episodes, _ in results for episode in episodes], sum(seconds for _, seconds in results)


def chunks_of(task_ids: Sequence[str], size: int) -> list[Sequence[str]]:
    """Returns the list in parts of so many tasks; the last may have fewer."""
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
    """Yields the episodes of each part of a list, in order, and the seconds they took.

    Args:
        suite: Where the tasks come from.
        chunks: Tasks that are played side by side.
        policy_for: Called with the number of the chunk that begins; returns the policy that plays it.
        context: See `protocol_context`.
        settings: See `protocol_settings`.
        seed: Handed to every `reset`.
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
