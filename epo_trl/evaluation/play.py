"""Plays the episodes of an evaluation under a protocol."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

from epo_trl.bounds import copy_options
from epo_trl.envs.base import Expert, Info, TaskSuite, TextEnv
from epo_trl.envs.border import close_all
from epo_trl.envs.checker import any_listed, checked_reset, checked_step
from epo_trl.errors import InputError
from epo_trl.evaluation.protocol import Protocol
from epo_trl.rollout import ContextBuilder, Engine, RolloutSettings, finished_episodes
from epo_trl.rollout.context import TurnView
from epo_trl.rollout.loop import Generate
from epo_trl.rollout.running_episode import RunningEpisode
from epo_trl.rollout.spec import ResponseArguments
from epo_trl.rollout.templates import FewShot
from epo_trl.types import Episode

T = TypeVar("T")


def protocol_context(
    protocol: Protocol,
    options: ResponseArguments,
    suite: TaskSuite,
    tokenizer: Any,
    shots: FewShot | None = None,
    max_context_tokens: int | None = None,
) -> ContextBuilder:
    """Creates the builder of the prompts of a protocol; `max_context_tokens` is the policy's maximum sequence length.

    Raises:
        InputError: If the protocol prescribes another prompt template.
    """
    template = options.template_for(suite)
    if protocol.prompt_template not in ("", template):
        raise InputError(
            f"prompt_template: expected {protocol.prompt_template!r}, which protocol {protocol.name!r} prescribes, got "
            f"{template!r}"
        )
    rules = protocol.context, protocol.history_length
    return options.build_context(suite, tokenizer, shots or FewShot(), *rules, max_context_tokens=max_context_tokens)


def protocol_settings(protocol: Protocol, *, require_think: bool = True) -> RolloutSettings:
    """Returns the rollout settings of a protocol."""
    return copy_options(RolloutSettings, protocol, require_think=require_think)


def check_first_task(env: TextEnv, task_id: str, seed: int, context: ContextBuilder, protocol: Protocol) -> None:
    """Checks before the evaluation that the first task starts, and that contract, template and limits fit it.

    What does not is an `EnvError`, a `TemplateError` or an `InputError`.
    """
    observation, info = checked_reset(env, task_id, seed, protocol.env_options)
    checked_step(env, "?", task_id, info)  # any text is allowed as action
    context.template.check(info)
    view = TurnView(observation, info, history=())
    if context.build([view])[0] is None:
        prompt: Any = replace(context, max_prompt_tokens=sys.maxsize, max_context_tokens=None).build([view])[0]
        limit = context.max_context_tokens
        raise InputError(
            f"max_prompt_length: expected at least the {len(prompt.ids)} tokens of the first prompt of task "
            f"{task_id!r}, with its examples, got {context.max_prompt_tokens}"
            + (f"; a response of {context.max_response_tokens} has to fit the model's {limit} with it" if limit else "")
        )


def sampled_tasks(suite: TaskSuite, split: str, count: int | None) -> list[str]:
    """Returns `count` tasks of a list, or all, in its order: a fixed random sample, and a larger one contains it."""
    ids = suite.task_ids(split)
    numbers = random.Random(0).sample(range(len(ids)), len(ids))[:count]
    return [ids[number] for number in sorted(numbers)]


def split_chunks(tasks: Sequence[T], size: int) -> list[Sequence[T]]:
    """Splits the list into chunks of `size`; the last may have fewer."""
    return [tasks[first : first + size] for first in range(0, len(tasks), size)]


def play_chunks(
    suite: TaskSuite,
    chunks: Sequence[Sequence[str]],
    policy_for: Callable[[int], Generate | Engine],
    context: ContextBuilder,
    settings: RolloutSettings,
    *,
    seed: int = 0,
    on_finished: Callable[[int], None] = lambda count: None,
) -> Iterator[tuple[list[Episode], float]]:
    """Yields the episodes of each chunk, in order, with the wall time in seconds since the chunk before.

    At most as many episodes as the longest chunk has are played in parallel. An engine without a barrier plays all
    chunks at once: an environment whose episode has ended plays the next task.

    Args:
        policy_for: Function from the number of a chunk to its policy. The first one plays all, if it has no barrier.
        seed: Seed passed to every `reset`.
        on_finished: Called with the number of episodes that have ended since the last call.
    """
    if not chunks:
        return
    first = policy_for(0)
    at_once = isinstance(first, Engine) and not first.in_step
    batches = [chunks] if at_once else [[chunk] for chunk in chunks]
    envs: list[TextEnv] = []
    try:
        for _ in range(max(map(len, chunks))):
            envs.append(suite.make_env())
        for number, batch in enumerate(batches):
            tasks = [(task_id, seed) for chunk in batch for task_id in chunk]
            playing = finished_episodes(envs, tasks, policy_for(number) if number else first, context, settings)
            yield from _in_chunks(playing, [len(chunk) for chunk in batch], on_finished)
    finally:
        close_all(envs)


def _in_chunks(
    playing: Iterator[tuple[int, Episode]], sizes: Sequence[int], on_finished: Callable[[int], None]
) -> Iterator[tuple[list[Episode], float]]:
    """Yields chunks of episodes, which end in any order, as soon as they and all before them are complete."""
    finished: dict[int, Episode] = {}
    first, ends, start = 0, list(accumulate(sizes)), time.perf_counter()
    for number, episode in playing:
        finished[number] = episode
        on_finished(1)
        while ends and all(i in finished for i in range(first, ends[0])):
            end = ends.pop(0)
            yield [finished.pop(i) for i in range(first, end)], time.perf_counter() - start
            first, start = end, time.perf_counter()


class RandomPlayer(Expert):
    """Chooses among the admissible actions, each with the same probability."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def act(self, observation: str, info: Info) -> tuple[str, str]:
        """Returns an empty thought and the action."""
        return "", any_listed(info, self._chance)


def play_scripted(
    suite: TaskSuite,
    chunks: Sequence[Sequence[str]],
    make_player: Callable[[int], Expert],
    settings: RolloutSettings,
    *,
    seed: int = 0,
    on_finished: Callable[[int], None] = lambda count: None,
) -> Iterator[tuple[list[Episode], float]]:
    """Yields the episodes of each chunk as `play_chunks` does, played one after the other by an expert.

    The argument of `make_player` is the seed of a new player for each episode. It depends on `seed` and the task only.
    """
    with contextlib.closing(suite.make_env()) as env:
        for chunk in chunks:
            episodes, start = [], time.perf_counter()
            for task_id in chunk:
                own = random.Random(f"{seed} {task_id}").randrange(2**31)
                player, episode = make_player(own), RunningEpisode(task_id, seed, env, settings)
                with episode.aborted_by_errors():
                    episode.start()
                    env.reseed(own)
                    player.reset(episode.observation, episode.info)
                    while episode.stop is None:
                        thought, action = player.act(episode.observation, episode.info)
                        episode.act(action, thought=thought, verbatim=True)
                episodes.append(episode.to_episode())
                on_finished(1)
            yield episodes, time.perf_counter() - start
