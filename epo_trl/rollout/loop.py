"""The rollout: many episodes in step with each other, one generation call per turn."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from epo_trl.envs.base import EnvError, Info, TextEnv
from epo_trl.rollout.context import ContextBuilder, Prompt, TurnView
from epo_trl.rollout.parsing import ParsedResponse, parse_response
from epo_trl.types import Episode, StopReason, Turn

# Token ids of prompts -> token ids of responses, and their log-probabilities if the generator knows them.
Generate = Callable[[list[list[int]]], tuple[list[list[int]], list[list[float]] | None]]

INVALID_ACTIONS = ("pass", "skip")
SUCCESS_RULES = {
    "won": "the engine's own `won`: the task is solved, whatever the reward",
    "ended-with-score": "the engine ended the episode, for whatever reason, with a score above 0 (exploitable)",
}
NOT_ACCEPTED = "the environment does not know this action"


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """The rules of a rollout.

    Args:
        max_turns: Turn budget of an episode.
        success_reward: Paid on the turn that solves the task.
        invalid_action_penalty: Subtracted on every turn whose action is not valid.
        env_reward_weight: Factor on the environment's own reward, added on every turn.
        invalid_action: What becomes of an action that is not valid: `"pass"` hands it to the environment, which
            answers in its own words; `"skip"` leaves the environment alone and repeats the observation. Of an
            environment that lists no actions, only ill-formed ones can be skipped; the others it judges itself.
        require_think: Whether a response without reasoning is invalid.
        success_rule: A key of `SUCCESS_RULES`: what counts as solved.
        env_options: Handed to every `reset`, beside the task.
    """

    max_turns: int = 50
    success_reward: float = 10.0
    invalid_action_penalty: float = 0.1
    env_reward_weight: float = 0.0
    invalid_action: str = "pass"
    require_think: bool = True
    success_rule: str = "won"
    env_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns: got {self.max_turns}, takes an integer >= 1")
        if self.invalid_action not in INVALID_ACTIONS:
            raise ValueError(f"invalid_action: got {self.invalid_action!r}, takes one of {INVALID_ACTIONS}")
        if self.success_rule not in SUCCESS_RULES:
            raise ValueError(f"success_rule: got {self.success_rule!r}, takes one of {tuple(SUCCESS_RULES)}")
        if self.invalid_action_penalty < 0:
            raise ValueError(f"invalid_action_penalty: got {self.invalid_action_penalty}, takes a number >= 0")


@dataclass(slots=True)
class RolloutTimes:
    """Seconds that a rollout spent in generation, in environments, and in building prompts and parsing."""

    generate: float = 0.0
    env: float = 0.0
    text: float = 0.0


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What the policy said."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] | None


@dataclass(slots=True)
class _Play:
    """One running episode."""

    task_id: str
    seed: int
    env: TextEnv
    observation: str = ""
    info: Info = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    history: list[tuple[str, str]] = field(default_factory=list)
    context_ids: list[int] = field(default_factory=list)  # concatenated context: the sequence so far
    sampled: _Sampled | None = None  # of the turn that is being taken, like the next two
    parsed: ParsedResponse | None = None
    is_sent: bool = False  # whether the environment got its action
    stop: StopReason | None = None
    error: str = ""

    @contextlib.contextmanager
    def aborted_by_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.stop, self.error = StopReason.ABORTED, f"{type(error).__name__}: {error}"

    def to_episode(self) -> Episode:
        assert self.stop is not None
        return Episode(
            task_id=self.task_id,
            task=str(self.info.get("task", "")),
            task_type=str(self.info.get("task_type", "")),
            turns=tuple(self.turns),
            stop=self.stop,
            won=self.stop is StopReason.WON,
            final_observation=self.observation,
            error=self.error,
            seed=self.seed,
            score=self.info.get("score"),
            final_info=self.info,
        )


@dataclass(slots=True)
class _Wave:
    """Episodes that take their turns together; those of `running` have an action to which the answer is awaited."""

    plays: list[_Play]
    running: list[tuple[_Play, Prompt]] = field(default_factory=list)


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
    """Returns one episode per task, in order.

    All episodes advance together: each turn is one generation call with the prompts of the episodes that still run.
    Of each turn, all actions are sent before the first answer is awaited. With several waves, the environments of one
    work while the policy answers for another. An exception in an environment or in the parser, or an answer that
    cannot be shown, aborts that episode alone.

    Args:
        envs: At least as many environments as tasks.
        tasks: `(task_id, seed)` pairs. Equal pairs start from the identical state.
        generate: The policy.
        context: Builds the prompts.
        settings: The rules.
        prompts_needed: Called once a turn with the number of running episodes; returns how many prompts this process
            must generate for, 0 to stop. A distributed caller makes all ranks stop together; the difference is filled
            up with dummy prompts whose responses are thrown away.
        on_finished: Called with the number of episodes that ended in a turn, for a progress bar.
        times: Filled with what was spent where.
        waves: Into how many parts the episodes are split. While a prompt of one part is answered by the policy, the
            environments of the others work; each part takes generation calls of its own.
    """
    times = times if times is not None else RolloutTimes()
    if len(envs) < len(tasks):
        raise ValueError(f"envs: got {len(envs)} for {len(tasks)} tasks, takes at least one each")
    plays = [_Play(task_id, seed, env) for (task_id, seed), env in zip(tasks, envs, strict=False)]
    start = time.perf_counter()
    _reset_all(plays, settings.env_options)
    times.env += time.perf_counter() - start

    turning = deque(_Wave(plays[i::waves]) for i in range(waves))
    finished = 0
    while turning:
        wave = turning.popleft()
        start = time.perf_counter()
        _take_turns(wave, settings)
        times.env += time.perf_counter() - start

        start = time.perf_counter()
        wave.running = _with_prompts([play for play in wave.plays if play.stop is None], context)
        times.text += time.perf_counter() - start
        done = sum(play.stop is not None for play in plays)
        on_finished(done - finished)
        finished = done

        needed = prompts_needed(len(wave.running))
        if needed == 0:
            continue
        prompt_ids = [play.context_ids + prompt.ids for play, prompt in wave.running]
        prompt_ids += [[context.tokenizer.eos_token_id]] * (needed - len(wave.running))
        start = time.perf_counter()
        response_ids, logprobs = generate(prompt_ids)
        times.generate += time.perf_counter() - start

        start = time.perf_counter()
        texts = context.tokenizer.batch_decode(response_ids[: len(wave.running)], skip_special_tokens=True)
        times.text += time.perf_counter() - start
        start = time.perf_counter()
        for i, ((play, prompt), text) in enumerate(zip(wave.running, texts, strict=False)):
            play.sampled = _Sampled(tuple(response_ids[i]), text, tuple(logprobs[i]) if logprobs else None)
            if context.mode == "concatenated":
                play.context_ids += [*prompt.ids, *response_ids[i]]
            with play.aborted_by_errors():
                _send_action(play, context.answer_start + text, settings)
        times.env += time.perf_counter() - start
        turning.append(wave)
    return [play.to_episode() for play in plays]


def _reset_all(plays: list[_Play], options: Mapping[str, Any]) -> None:
    for play in plays:
        with play.aborted_by_errors():
            play.env.reset_async(seed=play.seed, options={**options, "task_id": play.task_id})
    for play in plays:
        with play.aborted_by_errors():
            if play.stop is None:
                play.observation, play.info = play.env.reset_wait()


def _with_prompts(plays: list[_Play], context: ContextBuilder) -> list[tuple[_Play, Prompt]]:
    try:
        prompts = context.build([_view(play) for play in plays]) if plays else []
    except Exception:  # what one environment said cannot be shown; find out which
        prompts = [_prompt_alone(play, context) for play in plays]
        if all(play.error and not play.turns for play in plays):
            raise  # no first prompt can be built: the template is wrong, not an environment
    running = []
    for play, prompt in zip(plays, prompts, strict=True):
        if prompt is not None:
            running.append((play, prompt))
        elif play.stop is None:
            play.stop = StopReason.CONTEXT_FULL
    return running


def _prompt_alone(play: _Play, context: ContextBuilder) -> Prompt | None:
    with play.aborted_by_errors():
        return context.build([_view(play)])[0]
    return None


def _view(play: _Play) -> TurnView:
    return TurnView(
        observation=play.observation,
        info=play.info,
        history=play.history,
        last_response_ids=play.turns[-1].response_ids if play.turns else (),
        context_tokens=len(play.context_ids),
    )


def _take_turns(wave: _Wave, settings: RolloutSettings) -> None:
    """Awaits what the environments answer to the actions that were sent to them."""
    for play, prompt in wave.running:
        with play.aborted_by_errors():
            if play.stop is None:
                _take_turn(play, prompt, settings)


def _send_action(play: _Play, text: str, settings: RolloutSettings) -> None:
    play.parsed = parse_response(text, play.info["admissible_actions"], require_think=settings.require_think)
    play.is_sent = play.parsed.is_valid or settings.invalid_action == "pass"
    if play.is_sent:
        play.env.step_async(play.parsed.action)


def _take_turn(play: _Play, prompt: Prompt, settings: RolloutSettings) -> None:
    parsed, sampled = play.parsed, play.sampled
    assert parsed is not None and sampled is not None
    if play.is_sent:
        observation, env_reward, terminated, truncated, info = play.env.step_wait()
        if parsed.is_valid and not info.get("accepted", True):
            parsed = replace(parsed, error=NOT_ACCEPTED)
    else:
        observation, env_reward, terminated, truncated, info = play.observation, 0.0, False, False, play.info
    won = bool(info["won"]) and terminated
    if settings.success_rule == "ended-with-score":
        won = (terminated or truncated) and info["score"] > 0
    reward = settings.env_reward_weight * float(env_reward) + settings.success_reward * won
    if not parsed.is_valid:
        reward -= settings.invalid_action_penalty
    if not math.isfinite(reward):
        raise EnvError(f"reward: the environment gave {env_reward!r} for {parsed.action!r}, takes a finite number")
    play.turns.append(
        Turn(
            prompt_ids=tuple(prompt.ids),
            response_ids=sampled.ids,
            response=sampled.text,
            observation=play.observation,
            action=parsed.action,
            is_valid=parsed.is_valid,
            reward=reward,
            logprobs=sampled.logprobs,
            dropped_turns=prompt.dropped_turns,
            error=parsed.error,
        )
    )
    play.history.append((play.observation, parsed.action))
    play.observation, play.info = observation, info
    if won:
        play.stop = StopReason.WON
    elif terminated:
        play.stop = StopReason.LOST
    elif truncated:
        play.stop = StopReason.TRUNCATED
    elif len(play.turns) >= settings.max_turns:
        play.stop = StopReason.TURN_LIMIT
