"""The texts from whose words a tiny model's vocabulary is made."""

from __future__ import annotations

from string import Formatter

from epo_trl.envs.base import EnvError, Expert, TaskSuite
from epo_trl.rollout.demonstrations import ANSWER
from epo_trl.rollout.templates import OPTIONAL_PARTS, PARTS, PromptTemplate

CORPUS_TASKS = 300
CORPUS_TURNS = 50
NO_ACTION = "?"  # admissible nowhere


def corpus(suite: TaskSuite, template: str) -> list[str]:
    """Returns texts with every word that prompts and expert answers use, from the first training tasks.

    The environment's answer to an action that is not admissible is among them.
    """
    words = PromptTemplate.load(template)
    parts = (getattr(words, part) for part in (*PARTS, *OPTIONAL_PARTS))
    texts = {text for text in parts if text} | {ANSWER}
    shown = {name for text in texts for _, name, _, _ in Formatter().parse(text) if name}
    env = suite.make_env()
    for seed, task_id in enumerate(suite.demonstration_tasks("train", CORPUS_TURNS, CORPUS_TASKS)):
        observation, info = env.reset(seed=seed, options={"task_id": task_id})
        expert = _expert(suite, seed)
        answer, _, terminated, truncated, _ = env.step(NO_ACTION)
        texts.add(answer)  # what a policy sees after a mistake
        if terminated or truncated:  # where no actions are listed, `?` may be one
            observation, info = env.reset(seed=seed, options={"task_id": task_id})
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
    env.close()
    return sorted(texts)


def _expert(suite: TaskSuite, seed: int) -> Expert:
    try:
        return suite.make_expert(seed)
    except EnvError as error:
        has_one = type(suite).make_expert is not TaskSuite.make_expert  # and it says itself what it needs
        what = "or take" if has_one else f"write {type(suite).__name__}.make_expert(), or take"
        raise EnvError(
            f"model_name_or_path: got 'tiny', whose vocabulary is what an expert of the environment sees and does, "
            f"but {error}; {what} a model of the Hub or a local one"
        ) from error
