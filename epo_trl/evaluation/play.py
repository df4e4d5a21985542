"""How a protocol is played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from epo_trl.envs.base import TaskSuite, TextEnv
from epo_trl.evaluation.protocol import Protocol
from epo_trl.evaluation.report import EvalReport
from epo_trl.rollout import ContextBuilder, PromptTemplate, RolloutSettings, RolloutTimes, play_episodes
from epo_trl.rollout.loop import Generate
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
) -> ContextBuilder:
    """Returns what builds the protocol's prompts."""
    return ContextBuilder(
        tokenizer,
        PromptTemplate.load(template),
        mode=protocol.context,
        history_length=protocol.history_length,
        max_prompt_tokens=max_prompt_tokens,
        max_context_tokens=max_context_tokens,
        max_response_tokens=max_response_tokens,
        chat_template_kwargs=chat_template_kwargs or {},
    )


def protocol_settings(protocol: Protocol, *, require_think: bool = True) -> RolloutSettings:
    """Returns the protocol's rules."""
    return RolloutSettings(
        max_turns=protocol.max_turns, invalid_action=protocol.invalid_action, require_think=require_think
    )


def evaluate_split(
    suite: TaskSuite,
    split: str,
    generate: Generate,
    context: ContextBuilder,
    protocol: Protocol,
    *,
    seed: int = 0,
    max_episodes: int | None = None,
    parallel: int = 64,
    require_think: bool = True,
    on_finished: Callable[[int], None] = lambda count: None,
) -> tuple[EvalReport, list[Episode]]:
    """Returns the report of one whole list and its episodes.

    Args:
        suite: The tasks.
        split: The list.
        generate: The policy, at the protocol's temperature.
        context: See `protocol_context`.
        protocol: The rules.
        seed: Handed to every `reset`.
        max_episodes: Play the first N tasks only; the report then says how many.
        parallel: Episodes that are played side by side.
        require_think: Whether a response without reasoning is invalid.
        on_finished: Called with the number of episodes that have ended since the last call.
    """
    task_ids: Sequence[str] = suite.task_ids(split)[:max_episodes]
    envs: list[TextEnv] = [suite.make_env() for _ in range(min(parallel, len(task_ids)))]
    times = RolloutTimes()
    episodes: list[Episode] = []
    try:
        for start in range(0, len(task_ids), parallel):
            tasks = [(task_id, seed) for task_id in task_ids[start : start + parallel]]
            episodes += play_episodes(
                envs,
                tasks,
                generate,
                context,
                protocol_settings(protocol, require_think=require_think),
                on_finished=on_finished,
                times=times,
            )
    finally:
        for env in envs:
            env.close()
    report = EvalReport.from_episodes(
        episodes, protocol=protocol, suite=suite.name, split=split, seconds=times.generate + times.env + times.text
    )
    return report, episodes
