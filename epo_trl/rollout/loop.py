"""The rollout loop: episodes play against an engine, together or each at its own pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from epo_trl.envs.base import TextEnv
from epo_trl.envs.border import ends_episode_alone
from epo_trl.errors import InputError
from epo_trl.rollout.context import ContextBuilder, Prompt, TurnView
from epo_trl.rollout.engine import Engine, EngineError, Generate, InStep, Response
from epo_trl.rollout.running_episode import RunningEpisode
from epo_trl.rollout.spec import RolloutSettings
from epo_trl.types import Episode, StopReason

_POLL_SECONDS = 0.001  # between two looks at environments in other processes


@dataclass(slots=True)
class RolloutTimes:
    """Seconds that a rollout spends in generation, in environments, and in building prompts and parsing."""

    generate: float = 0.0
    env: float = 0.0
    text: float = 0.0

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Adds the duration of the block to a field."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - start)


def play_episodes(
    envs: Sequence[TextEnv],
    tasks: Sequence[tuple[str, int]],
    policy: Engine | Generate,
    context: ContextBuilder,
    settings: RolloutSettings,
    *,
    on_finished: Callable[[int], None] = lambda count: None,
    times: RolloutTimes | None = None,
) -> list[Episode]:
    """Plays one episode per task and returns the episodes in the order of the tasks; see `finished_episodes`.

    Args:
        on_finished: Called with the number of episodes that have ended since the last call, for a progress bar.
    """
    finished: dict[int, Episode] = {}
    for number, episode in finished_episodes(envs, tasks, policy, context, settings, times=times):
        finished[number] = episode
        on_finished(1)
    return [finished[number] for number in range(len(tasks))]


def finished_episodes(
    envs: Sequence[TextEnv],
    tasks: Sequence[tuple[str, int]],
    policy: Engine | Generate,
    context: ContextBuilder,
    settings: RolloutSettings,
    *,
    times: RolloutTimes | None = None,
) -> Iterator[tuple[int, Episode]]:
    """Plays one episode per task and yields each when it has ended, with the index of its task.

    With an engine that generates in lockstep, as with a function, each turn of all running episodes is one generation
    call. With another engine an episode goes on as soon as its own response and its own environment have answered, and
    an environment whose episode has ended plays the next task if there are fewer environments than tasks. All
    environments are asked before any is awaited. An exception in an environment or in the parser, or an observation
    that cannot be encoded, aborts only that episode.

    Args:
        envs: Environments; with an engine that generates in lockstep, at least one per task.
        tasks: `(task_id, seed)` pairs. Equal pairs start from the identical state.
        policy: Engine, or a function that maps prompts to responses.
        context: Builder of the prompts.
        settings: Rules of the rollout.
        times: Accumulator of the time spent in each phase.
    """
    times = times if times is not None else RolloutTimes()
    engine = policy if isinstance(policy, Engine) else InStep(policy)
    if len(envs) < (len(tasks) if engine.in_step else min(len(tasks), 1)):
        raise InputError(f"envs: expected at least one per task, got {len(envs)} for {len(tasks)} tasks")
    episodes: list[RunningEpisode] = []
    with times.measure("env"):
        acting = _start_next(episodes, tasks, envs, settings)  # episodes whose environment is working
    asked = 0  # number of episodes that await a response
    is_first = True
    while True:
        with times.measure("env"):
            observed = take_answers(episodes, acting, wait=not asked, for_all=is_first or engine.in_step)
        is_first = False
        acting = [i for i in acting if i not in observed]
        with times.measure("text"):
            set_prompts([episodes[i] for i in observed if episodes[i].stop is None], context)
        ended = [i for i in observed if episodes[i].stop is not None]
        yield from ((i, episodes[i].to_episode()) for i in ended)
        running = [i for i in observed if episodes[i].stop is None]
        for i in running:
            engine.submit(i, episodes[i].ids_to_continue())
        asked += len(running)
        with times.measure("env"):
            acting += _start_next(episodes, tasks, [episodes[i].env for i in ended], settings)
        if not (asked or acting or engine.in_step):
            break

        responses: list[Response] | None = []
        if asked or engine.in_step:
            with times.measure("generate"):
                responses = engine.collect(_POLL_SECONDS if acting else None)
        if responses is None:
            break
        asked -= len(responses)
        if responses:
            send_actions(episodes, responses, context, times)
        acting += [response.number for response in responses]


def _start_next(
    episodes: list[RunningEpisode], tasks: Sequence[tuple[str, int]], free: Sequence[TextEnv], settings: RolloutSettings
) -> list[int]:
    """Starts the next tasks in the free environments, adds their episodes to the list and returns their indices."""
    first = len(episodes)
    for (task_id, seed), env in zip(tasks[first:], free, strict=False):
        episode = RunningEpisode(task_id, seed, env, settings)
        with episode.aborted_by_errors():
            episode.send_reset()
        episodes.append(episode)
    return list(range(first, len(episodes)))


def send_actions(
    episodes: Sequence[RunningEpisode], responses: Sequence[Response], context: ContextBuilder, times: RolloutTimes
) -> None:
    """Sends the action in each response to its environment."""
    with times.measure("text"):
        texts = context.decode([response.ids for response in responses])
    with times.measure("env"):
        for response, text in zip(responses, texts, strict=True):
            episode = episodes[response.number]
            with episode.aborted_by_errors():
                if response.error or not response.ids:
                    raise EngineError(response.error or "the engine returned a response without a token")
                episode.send_action(response.ids, text, response.logprobs, context)


def take_answers(episodes: Sequence[RunningEpisode], acting: Sequence[int], *, wait: bool, for_all: bool) -> list[int]:
    """Takes the answers of environments, and returns their episodes.

    Args:
        episodes: All episodes.
        acting: Indices of episodes whose environment is working.
        wait: Whether to wait for the first one.
        for_all: Whether to await all, one by one.
    """
    while not (ready := [i for i in acting if for_all or episodes[i].has_answer()]) and acting and wait:
        time.sleep(_POLL_SECONDS)
    for i in ready:
        with episodes[i].aborted_by_errors():
            if episodes[i].stop is None:
                episodes[i].await_answer()
    return ready


def set_prompts(episodes: list[RunningEpisode], context: ContextBuilder) -> None:
    """Sets the next prompt of every episode."""
    prompts = build_prompts(context, [episode.view() for episode in episodes])
    for episode, prompt in zip(episodes, prompts, strict=True):
        with episode.aborted_by_errors():
            if isinstance(prompt, BaseException):
                raise prompt
            episode.prompt = prompt
            if prompt is None:
                episode.stop = StopReason.CONTEXT_FULL


def build_prompts(context: ContextBuilder, views: Sequence[TurnView]) -> list[Prompt | BaseException | None]:
    """Builds one prompt per view as `ContextBuilder.build` does, or the exception where a view cannot be shown."""
    try:
        return [*context.build(views)] if views else []
    except BaseException as error:  # of one environment's observation; find out which
        if not ends_episode_alone(error):
            raise
        if len(views) == 1:
            return [error]
    return [prompt for view in views for prompt in build_prompts(context, [view])]
