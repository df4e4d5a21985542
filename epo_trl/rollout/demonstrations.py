"""Expert episodes as training examples (the policy's prompts with the expert's answers) and as few-shot examples."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from epo_trl.envs.base import Info, TaskSuite, TextEnv
from epo_trl.envs.border import checked_answer, squeeze
from epo_trl.envs.checker import checked_reset
from epo_trl.errors import InputError
from epo_trl.rollout.context import ContextBuilder, Prompt, TurnView
from epo_trl.rollout.running_episode import RunningEpisode
from epo_trl.rollout.spec import FewShotArguments, RolloutSettings
from epo_trl.rollout.templates import Example, FewShot, PastTurn
from epo_trl.types import StopReason

ACTION = "<action> {action} </action>"
TRIES = 20  # maximum number of training tasks to try per few-shot example
ANSWER = f"<think> {{thought}} </think> {ACTION}"


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One turn of an expert, as token ids."""

    prompt_ids: list[int]  # the whole prompt in windowed context, what the turn appends in concatenated context
    response_ids: list[int]  # the answer, including the end-of-turn token
    is_learned: bool = True  # whether the answer is a label; an injected mistake is context only

    @property
    def input_ids(self) -> list[int]:
        """Token ids of the prompt followed by the answer."""
        return self.prompt_ids + self.response_ids

    def labels(self, prompt_label_rate: float, rng: random.Random) -> list[int]:
        """Returns the labels: every learned answer token, and each prompt token with the given probability.

        A rate r scales the prompt's loss by r. It teaches a model from scratch to read; a pretrained model needs 0.
        """
        prompt = [i if rng.random() < prompt_label_rate else -100 for i in self.prompt_ids]
        return prompt + (self.response_ids if self.is_learned else [-100] * len(self.response_ids))


class ExpertTurn(NamedTuple):
    """One expert turn: the input of its prompt, its thought and action, and the action that was executed."""

    view: TurnView
    thought: str
    action: str
    played: str


def expert_episodes(
    suite: TaskSuite,
    tasks: Sequence[tuple[str, int]],
    context: ContextBuilder,
    *,
    max_turns: int,
    mistake_rate: float = 0.0,
    keep_lost: bool = False,
    thoughts: bool = True,
    on_episode: Callable[[bool], None] = lambda won: None,
) -> Iterator[list[Demonstration]]:
    """Yields the turns of each episode that the suite's expert wins within the turn budget.

    In windowed context each turn is a separate training example. In concatenated context the turns of an episode are
    consecutive segments of one example.

    Args:
        tasks: `(task_id, seed)` pairs; the seed also controls the expert's choices.
        max_turns: Turn budget. Longer episodes are skipped, and lost ones unless `keep_lost` is set.
        mistake_rate: Probability of replacing the expert's action by one that was admissible earlier in the episode and
            no longer is. A windowed example keeps the expert's answer as its label. A concatenated example contains
            the mistake but does not learn it. Either way the policy sees the state after a mistake; a policy trained
            on flawless episodes does not recover from one (noise injection as in DART, Laskey et al. 2017, arXiv
            1703.09327). Requires an environment that lists its actions.
        keep_lost: Whether to keep lost episodes that ended within the turn budget.
        thoughts: Whether the answers include the expert's thoughts; set to `False` for `require_think=False`.
        on_episode: Callback after each task; its argument is whether the expert played and won it.
    """
    if not thoughts and context.answer_start:
        raise InputError(f"thoughts: expected True, got False: the chat template begins with {context.answer_start}")
    played = left_out = 0
    with contextlib.closing(suite.make_env()) as env:
        for task_id, seed in tasks:
            turns, won, ended = play_expert(suite, env, task_id, seed, max_turns, mistake_rate, thoughts=thoughts)
            context.template.check(turns[0].view.info)
            on_episode(won)
            if won or (keep_lost and ended):
                encoded = _encode(turns, context, ANSWER if thoughts else ACTION)
                played, left_out = played + len(turns), left_out + len(turns) - len(encoded)
                yield encoded
    if left_out:
        warnings.warn(
            f"max_prompt_length: got {context.max_prompt_tokens}, into which the prompts of {left_out} of {played} "
            "turns do not fit: they are not demonstrated",
            stacklevel=2,
        )


def play_expert(
    suite: TaskSuite,
    env: TextEnv,
    task_id: str,
    seed: int,
    max_turns: int,
    mistake_rate: float = 0.0,
    *,
    thoughts: bool = True,
    env_options: Mapping[str, Any] | None = None,
) -> tuple[list[ExpertTurn], bool, bool]:
    """Plays the expert; see `expert_episodes`. Returns its turns, whether it won, and whether the game ended."""
    start = checked_answer(*checked_reset(env, task_id, seed, env_options))
    episode = RunningEpisode(task_id, seed, env, RolloutSettings(max_turns=max_turns), *start)
    env.reseed(seed)
    expert = suite.make_expert(seed)
    expert.reset(episode.observation, episode.info)
    turns: list[ExpertTurn] = []
    chance = random.Random(f"mistakes {seed}")
    known: set[str] = set()
    while episode.stop is None:
        thought, action = expert.act(episode.observation, episode.info)
        view = replace(episode.view(), history=tuple(episode.history))
        played = _with_mistake(action, known, episode.info, mistake_rate, chance) if mistake_rate else action
        turns.append(ExpertTurn(view, thought, action, played))
        episode.act(played, thought=squeeze(thought) if thoughts else "", verbatim=True)
    return turns, bool(episode.info["won"]), episode.stop in (StopReason.WON, StopReason.LOST)


def few_shot_of(options: FewShotArguments, suite: TaskSuite, env_options: Mapping[str, Any] | None = None) -> FewShot:
    """Returns the examples in front of the first prompt: the first episodes that the suite's expert wins.

    Plays training tasks in random order; the examples are the same in every process. `env_options` are
    further options for every `reset`.

    Raises:
        InputError: If the expert wins too few of the tried tasks within the turns.
    """
    count, found = options.few_shot, list[Example]()
    if not count:
        return FewShot()
    ids = list(suite.demonstration_tasks("train", options.few_shot_turns, TRIES * count))
    chance = random.Random(options.few_shot_seed)
    chance.shuffle(ids)
    with contextlib.closing(suite.make_env()) as env:
        for task_id in ids:
            own = chance.randrange(2**31)
            turns, won, _ = play_expert(suite, env, task_id, own, options.few_shot_turns, env_options=env_options)
            if won:
                past = (PastTurn(turn.view.observation, turn.action, squeeze(turn.thought)) for turn in turns)
                found.append(Example(turns[0].view.info["task"], tuple(past)))
            if len(found) == count:
                return FewShot(tuple(found))
    raise InputError(
        f"few_shot: got {count}, but of {len(ids)} training tasks the expert solved {len(found)} within "
        f"few_shot_turns={options.few_shot_turns}; use fewer examples, or more turns"
    )


def _with_mistake(action: str, known: set[str], info: Info, rate: float, chance: random.Random) -> str:
    """Returns the action or, at the given rate, an inadmissible one of `known`; adds to `known`."""
    admissible = info["admissible_actions"]
    if admissible is None:
        raise InputError(f"mistake_rate: expected 0 for an environment that lists no admissible actions, got {rate}")
    known.update(admissible)
    wrong = sorted(known.difference(admissible))
    return chance.choice(wrong) if wrong and chance.random() < rate else action


def _encode(turns: Sequence[ExpertTurn], context: ContextBuilder, answer: str) -> list[Demonstration]:
    actions = [turn.action if context.is_windowed else turn.played for turn in turns]
    values = [{"thought": turn.thought, "action": action} for turn, action in zip(turns, actions, strict=True)]
    answers = [[*ids, context.answer_end] for ids in context.encode(answer.removeprefix(context.answer_start), values)]
    views = [turn.view for turn in turns]
    prompts = context.build(views) if context.is_windowed else _appended(views, answers, context)
    return [
        Demonstration(prompt.ids, ids, is_learned=action == turn.action)
        for prompt, ids, action, turn in zip(prompts, answers, actions, turns, strict=True)
        if prompt is not None
    ]


def _appended(views: Sequence[TurnView], answers: Sequence[list[int]], context: ContextBuilder) -> list[Prompt | None]:
    """Returns the tokens that each turn appends to a concatenated episode; `None` after the first that does not fit."""
    prompts: list[Prompt | None] = []
    carried: list[int] = []
    for view, before, ids in zip(views, [[], *answers], answers, strict=False):
        (prompt,) = context.build([replace(view, last_response_ids=before, context_tokens=len(carried))])
        if prompt is None:
            break
        prompts.append(prompt)
        carried = context.carried(carried, prompt, ids)
    return prompts + [None] * (len(views) - len(prompts))
