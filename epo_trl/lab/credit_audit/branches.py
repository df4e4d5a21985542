"""Plays episodes on from copies of a running episode, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from epo_trl.envs.base import TextEnv
from epo_trl.envs.border import close_all
from epo_trl.rollout import ContextBuilder, RolloutSettings
from epo_trl.rollout.engine import Generate, InStep
from epo_trl.rollout.loop import RolloutTimes, send_actions, set_prompts, take_answers
from epo_trl.rollout.running_episode import RunningEpisode
from epo_trl.types import Turn


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
        try:
            with twin.aborted_by_errors():
                twin.send_action(turn.response_ids, turn.response, turn.logprobs, context)
                twin.await_answer()
        except BaseException:
            close_all([twin.env])
            raise
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

    One that ends makes room for the next at once, so no generation call waits for the longest episode. An exception
    closes the environments of the running episodes.

    Args:
        waiting: Running episodes, taken when there is room for them.
        policy: Policy that maps prompts to responses.
        context: Builder of the prompts.
        parallel: Number of episodes in one generation call.
        before_turn: Called with each episode before its turn, when its prompt is known.
    """
    engine, times = InStep(policy), RolloutTimes()
    running: list[RunningEpisode] = []
    try:
        while True:
            running += islice(waiting, parallel - len(running))  # in place: an exception may come between two
            if not running:
                return
            set_prompts([episode for episode in running if episode.stop is None and episode.prompt is None], context)
            active = [episode for episode in running if episode.stop is None]
            for number, episode in enumerate(active):
                before_turn(episode)
                engine.submit(number, episode.ids_to_continue())
            if responses := engine.collect(None):
                send_actions(active, responses, context, times)
                take_answers(active, range(len(active)), wait=False, for_all=True)
            for episode in active:
                episode.prompt = None
            yield from (episode for episode in running if episode.stop is not None)
            running = [episode for episode in running if episode.stop is None]
    finally:
        close_all([episode.env for episode in running])
