"""Expert episodes as training examples: exactly the prompts that the policy will see, with the expert's answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from epo_trl.envs.base import Info, TaskSuite, TextEnv
from epo_trl.rollout.context import ContextBuilder, TurnView
from epo_trl.rollout.examples import PastTurn

ACTION = "<action> {action} </action>"
ANSWER = f"<think> {{thought}} </think> {ACTION}"


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One turn of an expert, as ids: `prompt_ids` and the answer with its end-of-turn token."""

    prompt_ids: list[int]
    response_ids: list[int]

    def labels(self, prompt_label_rate: float, rng: random.Random) -> list[int]:
        """Returns the labels: every answer token, and each prompt token with the given probability.

        A rate r weighs the prompt's loss by r. A model from scratch learns to read from it; a pretrained one needs 0.
        """
        prompt = [i if rng.random() < prompt_label_rate else -100 for i in self.prompt_ids]
        return prompt + self.response_ids


def expert_episodes(
    suite: TaskSuite,
    tasks: Sequence[tuple[str, int]],
    context: ContextBuilder,
    *,
    max_turns: int,
    task_types: Sequence[str] | None = None,
    mistake_rate: float = 0.0,
    keep_lost: bool = False,
    thoughts: bool = True,
    on_episode: Callable[[bool], None] = lambda won: None,
) -> Iterator[list[Demonstration]]:
    """Yields the turns of each episode that the suite's expert wins within the turn budget.

    The context must be windowed: a turn is then a training example of its own.

    Args:
        suite: Has an expert.
        tasks: `(task_id, seed)` pairs; the seed also makes the expert's choices.
        context: Builds the prompts.
        max_turns: Longer episodes are left out, and lost ones unless `keep_lost` is set.
        task_types: Tasks of other types are left out; by default none is.
        mistake_rate: Probability that the environment is given, in place of the expert's action, one that was
            admissible earlier in the episode and is not now. The example keeps the expert's answer; what is added is
            the state after the mistake, from which a policy that saw only flawless play does not find back (noise
            injection as in DART, Laskey et al. 2017, arXiv 1703.09327). An
            environment that lists no actions takes 0.
        keep_lost: Whether lost episodes that ended within the turn budget are kept too.
        thoughts: Whether the answers have the expert's thoughts; without them a policy of `require_think=False` learns.
        on_episode: Called after each task with whether the expert played and won it.
    """
    if not context.is_windowed:
        raise ValueError(f"context: got {context.mode!r}, demonstrations take 'windowed'")
    if not 0 <= mistake_rate < 1:
        raise ValueError(f"mistake_rate: got {mistake_rate}, takes a number in [0, 1)")
    if not thoughts and context.answer_start:
        raise ValueError(f"thoughts: got False, takes True: the chat template begins with {context.answer_start}")
    env = suite.make_env()
    try:
        for task_id, seed in tasks:
            observation, info = env.reset(seed=seed, options={"task_id": task_id})
            if task_types is not None and info["task_type"] not in task_types:
                on_episode(False)
                continue
            turns, won, ended = play_expert(suite, env, (observation, info), seed, max_turns, mistake_rate)
            on_episode(won)
            if won or (keep_lost and ended):
                yield _encode(turns, context, ANSWER if thoughts else ACTION)
    finally:
        env.close()


def play_expert(
    suite: TaskSuite, env: TextEnv, start: tuple[str, Info], seed: int, max_turns: int, mistake_rate: float = 0.0
) -> tuple[list[tuple[TurnView, dict[str, str]]], bool, bool]:
    """Returns what the expert saw, thought and did at each turn, whether it won, and whether the game ended.

    Args:
        suite: Has the expert.
        env: Has been reset.
        start: What the reset returned.
        seed: Of the expert's choices and mistakes.
        max_turns: Turn limit.
        mistake_rate: See `expert_episodes`.
    """
    observation, info = start
    expert = suite.make_expert(seed)
    expert.reset(observation, info)
    turns: list[tuple[TurnView, dict[str, str]]] = []
    history: list[PastTurn] = []
    chance = random.Random(seed)
    known: set[str] = set()
    for _ in range(max_turns):
        thought, action = expert.act(observation, info)
        view = TurnView(observation=observation, info=info, history=tuple(history))
        turns.append((view, {"thought": thought, "action": action}))
        if mistake_rate:
            action = _with_mistake(action, known, info, mistake_rate, chance)
        history.append(PastTurn(observation, action, thought))
        observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            break
    return turns, bool(info["won"]), terminated


def _with_mistake(action: str, known: set[str], info: Info, rate: float, chance: random.Random) -> str:
    """Returns the action, or at the given rate one of `known` that is not admissible; adds to `known`."""
    admissible = info["admissible_actions"]
    if admissible is None:
        raise ValueError(f"mistake_rate: got {rate}, takes 0 for an environment that lists no admissible actions")
    known.update(admissible)
    mistakes = sorted(known.difference(admissible))
    return chance.choice(mistakes) if mistakes and chance.random() < rate else action


def _encode(
    turns: Sequence[tuple[TurnView, dict[str, str]]], context: ContextBuilder, answer: str
) -> list[Demonstration]:
    prompts = context.build([view for view, _ in turns])
    answers = context.encode(answer.removeprefix(context.answer_start), [said for _, said in turns])
    end = context.tokenizer.eos_token_id
    return [
        Demonstration(prompt.ids, [*ids, end])
        for prompt, ids in zip(prompts, answers, strict=True)
        if prompt is not None
    ]
