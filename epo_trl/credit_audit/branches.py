"""Plays episodes on from copies of a running episode, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from epo_trl.envs.base import TextEnv
from epo_trl.rollout import ContextBuilder, RolloutSettings
from epo_trl.rollout.loop import Generate
from epo_trl.rollout.running_episode import RunningEpisode
from epo_trl.types import StopReason, Turn


def start(task_id: str, seed: int, env: TextEnv, settings: RolloutSettings) -> RunningEpisode:
    """Returns a running episode before its first turn. An error of the environment aborts it."""
    episode = RunningEpisode(task_id, seed, env, settings)
    with episode.aborted_by_errors():
        episode.send_reset()
        episode.await_answer()
    return episode


def branch(episode: RunningEpisode) -> RunningEpisode:
    """Returns an independent copy of a running episode, with a copy of its environment. An error aborts the copy.

    A copy that is aborted shares the environment.
    """
    twin = replace(
        episode, turns=list(episode.turns), history=list(episode.history), carried_ids=list(episode.carried_ids)
    )
    if twin.stop is None:
        with twin.aborted_by_errors():
            twin.env = episode.env.copy()
    return twin


def repeat_turn(episode: RunningEpisode, turn: Turn, context: ContextBuilder) -> RunningEpisode:
    """Returns a copy of a running episode in which the policy has given the response of a recorded turn."""
    twin = branch(episode)
    if twin.stop is None:
        with twin.aborted_by_errors():
            twin.send_action(turn.response_ids, turn.response, turn.logprobs, context)
            twin.await_answer()
        twin.prompt = None
    return twin


def play_to_end(
    waiting: Iterator[RunningEpisode],
    policy: Generate,
    context: ContextBuilder,
    *,
    parallel: int,
    before_turn: Callable[[RunningEpisode], None] = lambda episode: None,
) -> Iterator[RunningEpisode]:
    """Plays episodes to their ends, `parallel` at a time, and yields each when it has ended.

    One that ends makes room for the next at once, so no generation call waits for the longest episode.

    Args:
        waiting: Running episodes, taken when there is room for them.
        policy: Policy that maps prompts to responses.
        context: Builder of the prompts.
        parallel: Number of episodes in one generation call.
        before_turn: Called with each episode before its turn, when its prompt is known.
    """
    running: list[RunningEpisode] = []
    while running := [*running, *islice(waiting, parallel - len(running))]:
        _build_prompts(running, context)
        active = [episode for episode in running if episode.stop is None]
        for episode in active:
            before_turn(episode)
        if active:
            _take_turns(active, policy, context)
        yield from (episode for episode in running if episode.stop is not None)
        running = [episode for episode in running if episode.stop is None]


def _build_prompts(episodes: Sequence[RunningEpisode], context: ContextBuilder) -> None:
    missing = [episode for episode in episodes if episode.stop is None and episode.prompt is None]
    for episode, prompt in zip(missing, context.build([episode.view() for episode in missing]), strict=True):
        episode.prompt = prompt
        if prompt is None:
            episode.stop = StopReason.CONTEXT_FULL


def _take_turns(episodes: Sequence[RunningEpisode], policy: Generate, context: ContextBuilder) -> None:
    responses, logprobs = policy([episode.ids_to_continue() for episode in episodes])
    texts = context.decode(responses)
    for i, (episode, text) in enumerate(zip(episodes, texts, strict=True)):
        with episode.aborted_by_errors():
            episode.send_action(responses[i], text, logprobs[i] if logprobs else None, context)
    for episode in episodes:
        with episode.aborted_by_errors():
            if episode.stop is None:
                episode.await_answer()
        episode.prompt = None
