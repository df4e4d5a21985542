"""Collects the texts that define a tiny model's vocabulary."""

from __future__ import annotations

import contextlib
from string import Formatter

from epo_trl.envs.base import EnvError, TaskSuite
from epo_trl.envs.checker import checked_reset, checked_step
from epo_trl.rollout.demonstrations import ANSWER
from epo_trl.rollout.templates import PARTS, PromptTemplate

CORPUS_TASKS = 300
CORPUS_TURNS = 50
NO_ACTION = "?"  # never admissible


def corpus(suite: TaskSuite, template: str) -> list[str]:
    """Collects texts with every word of prompts and expert answers, from the first training tasks.

    They include the environment's reply to an inadmissible action.
    """
    words = PromptTemplate.load(template)
    parts = (getattr(words, part) for part in PARTS)
    texts = {text for text in parts if text} | {ANSWER}
    shown = {name for text in texts for _, name, _, _ in Formatter().parse(text) if name}
    with contextlib.closing(suite.make_env()) as env:
        for seed, task_id in enumerate(suite.demonstration_tasks("train", CORPUS_TURNS, CORPUS_TASKS)):
            observation, info = checked_reset(env, task_id, seed)
            env.reseed(seed)
            try:
                expert = suite.make_expert(seed)
            except EnvError as error:
                raise EnvError(
                    "model_name_or_path: got 'tiny', whose vocabulary comes from the environment's expert, but "
                    f"{error}; write make_expert(), or use a model from the Hub or a local one"
                ) from error
            answer, _, terminated, truncated, _ = checked_step(env, NO_ACTION, task_id, info)
            texts.add(answer)  # the observation after a mistake
            if terminated or truncated:  # `?` may be a valid action where none are listed
                observation, info = env.reset(seed=seed, options={"task_id": task_id})
                env.reseed(seed)
            expert.reset(observation, info)
            for _ in range(CORPUS_TURNS):
                texts |= {observation, info["task"], *(info["admissible_actions"] or ())}
                for name in shown & info.keys():
                    value = info[name]
                    texts |= set(map(str, value)) if isinstance(value, tuple | list) else {str(value)}
                thought, action = expert.act(observation, info)
                texts |= {thought, action}
                observation, _, terminated, truncated, info = env.step(action)
                if terminated or truncated:
                    break
            texts.add(observation)
    return sorted(texts)
