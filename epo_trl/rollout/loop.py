"""The rollout loop: many episodes in lockstep, one generation call per turn."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from epo_trl.envs.base import TextEnv
from epo_trl.envs.border import ends_episode_alone
from epo_trl.rollout.context import ContextBuilder, Prompt
from epo_trl.rollout.rules import RolloutSettings
from epo_trl.rollout.running_episode import RunningEpisode, Sampled
from epo_trl.types import Episode, StopReason

# Maps token ids of prompts to token ids of responses, and their log-probabilities if the generator returns them.
Generate = Callable[[list[list[int]]], tuple[list[list[int]], list[list[float]] | None]]


@dataclass(slots=True)
class RolloutTimes:
    """Seconds that a rollout spends in generation, in environments, and in building prompts and parsing."""

    generate: float = 0.0
    env: float = 0.0
    text: float = 0.0


@dataclass(slots=True)
class _Wave:
    """Episodes that advance together; those in `waiting` have sent an action and await its outcome."""

    episodes: list[RunningEpisode]
    waiting: list[RunningEpisode] = field(default_factory=list)


def play_episodes(
    envs: Sequence[TextEnv],
    tasks: Sequence[tuple[str, int]],
    generate: Generate,
    context: ContextBuilder,
    settings: RolloutSettings,
    *,
    prompts_needed: Callable[[int], int] = lambda active: active,
    on_finished: Callable[[int], None] = lambda count: None,
    times: RolloutTimes | None = None,
    waves: int = 1,
) -> list[Episode]:
    """Plays one episode per task and returns the episodes in order.

    All episodes advance in lockstep: each turn is one generation call with the prompts of the episodes still running.
    All actions of a turn are sent before the first outcome is awaited. With several waves, the environments of one wave
    step while the policy responds for another. An exception in an environment or in the parser, or an observation that
    cannot be encoded, aborts only that episode.

    Args:
        envs: Environments, at least one per task.
        tasks: `(task_id, seed)` pairs. Equal pairs start from the identical state.
        generate: Policy that maps prompts to responses.
        context: Builder of the prompts.
        settings: Rules of the rollout.
        prompts_needed: Called once a turn with the number of running episodes; returns how many prompts this process
            must generate for, 0 to stop. A distributed caller uses it to make all ranks stop together; dummy prompts,
            whose responses are discarded, make up the difference.
        on_finished: Called with the number of episodes that ended in a turn, for a progress bar.
        times: Accumulator of the time spent in each phase.
        waves: Number of groups that the episodes are split into. While the policy responds for one group, the
            environments of the others step; each group makes its own generation calls.
    """
    times = times if times is not None else RolloutTimes()
    if len(envs) < len(tasks):
        raise ValueError(f"envs: expected at least one per task, got {len(envs)} for {len(tasks)} tasks")
    episodes = [RunningEpisode(task_id, seed, env, settings) for (task_id, seed), env in zip(tasks, envs, strict=False)]
    start = time.perf_counter()
    _reset_all(episodes)
    times.env += time.perf_counter() - start

    turning = deque(_Wave(episodes[i::waves]) for i in range(waves))
    finished = 0
    while turning:
        wave = turning.popleft()
        start = time.perf_counter()
        _await_outcomes(wave)
        times.env += time.perf_counter() - start

        start = time.perf_counter()
        wave.waiting = _with_prompts([episode for episode in wave.episodes if episode.stop is None], context)
        times.text += time.perf_counter() - start
        done = sum(episode.stop is not None for episode in episodes)
        on_finished(done - finished)
        finished = done

        needed = prompts_needed(len(wave.waiting))
        if needed == 0:
            continue
        prompt_ids = [episode.ids_to_continue() for episode in wave.waiting]
        prompt_ids += [[context.tokenizer.eos_token_id]] * (needed - len(wave.waiting))
        start = time.perf_counter()
        response_ids, logprobs = generate(prompt_ids)
        times.generate += time.perf_counter() - start

        start = time.perf_counter()
        texts = context.tokenizer.batch_decode(response_ids[: len(wave.waiting)], skip_special_tokens=True)
        times.text += time.perf_counter() - start
        start = time.perf_counter()
        for i, (episode, text) in enumerate(zip(wave.waiting, texts, strict=False)):
            sampled = Sampled(tuple(response_ids[i]), text, tuple(logprobs[i]) if logprobs else None)
            with episode.aborted_by_errors():
                episode.send_action(sampled, context)
        times.env += time.perf_counter() - start
        turning.append(wave)
    return [episode.to_episode() for episode in episodes]


def _reset_all(episodes: list[RunningEpisode]) -> None:
    for episode in episodes:
        with episode.aborted_by_errors():
            episode.send_reset()
    for episode in episodes:
        with episode.aborted_by_errors():
            if episode.stop is None:
                episode.await_reset()


def _await_outcomes(wave: _Wave) -> None:
    for episode in wave.waiting:
        with episode.aborted_by_errors():
            if episode.stop is None:
                episode.await_outcome()


def _with_prompts(episodes: list[RunningEpisode], context: ContextBuilder) -> list[RunningEpisode]:
    """Sets the next prompt of every episode and returns the episodes that continue."""
    try:
        prompts = context.build([episode.view() for episode in episodes]) if episodes else []
    except BaseException as error:  # one environment's observation cannot be encoded; find out which
        if not ends_episode_alone(error):
            raise
        prompts = [_prompt_alone(episode, context) for episode in episodes]
        if all(episode.error and not episode.turns for episode in episodes):
            raise  # no first prompt can be built: the template is at fault, not an environment
    for episode, prompt in zip(episodes, prompts, strict=True):
        episode.prompt = prompt
        if prompt is None and episode.stop is None:
            episode.stop = StopReason.CONTEXT_FULL
    return [episode for episode in episodes if episode.stop is None]


def _prompt_alone(episode: RunningEpisode, context: ContextBuilder) -> Prompt | None:
    with episode.aborted_by_errors():
        return context.build([episode.view()])[0]
    return None
