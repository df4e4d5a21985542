"""From `model_name_or_path` to a policy and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from string import Formatter
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from trl import ModelConfig

from epo_trl.envs.base import TaskSuite
from epo_trl.models.tiny import build_model, build_tokenizer
from epo_trl.rollout.demonstrations import ANSWER
from epo_trl.rollout.templates import PARTS, PromptTemplate

TINY = "tiny"
CORPUS_TASKS = 300
CORPUS_TURNS = 50
NO_ACTION = "?"  # admissible nowhere


def load_policy(
    model_args: ModelConfig, suite: TaskSuite, template: str, *, seed: int = 0, trust_remote_code: bool = False
) -> tuple[str | PreTrainedModel, Any]:
    """Returns the model, or its name for TRL to load, and the tokenizer.

    Args:
        model_args: `model_name_or_path` is a Hub id, a local path, or `"tiny"`: some 400,000 weights from scratch,
            with a vocabulary made from the suite's text. For that one, `lora_target_modules` is filled in.
        suite: The tasks.
        template: Name or folder of the prompt template.
        seed: Of the tiny model's weights.
        trust_remote_code: Whether the Hub's own code may run.
    """
    name = model_args.model_name_or_path
    if name is None:
        raise ValueError("model_name_or_path: got nothing, takes a Hub id, a local path or 'tiny'")
    if name != TINY:
        return name, load_tokenizer(name, revision=model_args.model_revision, trust_remote_code=trust_remote_code)
    if model_args.lora_target_modules is None:  # PEFT knows none for this architecture
        model_args.lora_target_modules = ["q_proj", "v_proj"]
    tokenizer = build_tokenizer(corpus(suite, template))
    return build_model(tokenizer, seed=seed), tokenizer


def load_tokenizer(path: str, **kwargs: Any) -> Any:
    """Returns the tokenizer of a Hub id or a local path, padding on the left.

    A local folder whose tokenizer says that it is a plain fast tokenizer is read as one. `AutoTokenizer` would not
    beside every model: for some architectures, Qwen2 among them, it replaces the saved class by the architecture's own.
    """
    config = Path(path) / "tokenizer_config.json"
    if config.is_file():
        saved = json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class")
        if saved in ("PreTrainedTokenizerFast", "TokenizersBackend"):
            return PreTrainedTokenizerFast.from_pretrained(path, padding_side="left")
    return AutoTokenizer.from_pretrained(path, padding_side="left", **kwargs)


def corpus(suite: TaskSuite, template: str) -> list[str]:
    """Returns texts with every word that prompts and expert answers use, from the first training tasks.

    The environment's answer to an action that is not admissible is among them.
    """
    words = PromptTemplate.load(template)
    texts = {getattr(words, part) for part in PARTS} | {ANSWER}
    shown = {name for text in texts for _, name, _, _ in Formatter().parse(text) if name}
    env = suite.make_env()
    for seed, task_id in enumerate(suite.demonstration_tasks("train", CORPUS_TURNS, CORPUS_TASKS)):
        observation, info = env.reset(seed=seed, options={"task_id": task_id})
        expert = suite.make_expert(seed)
        expert.reset(observation, info)
        texts.add(env.step(NO_ACTION)[0])  # changes nothing; the answer is what a policy sees after a mistake
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
