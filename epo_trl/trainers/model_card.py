"""Model cards with the method and its paper, base model, environment, protocol, results, and code to use the model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard, ModelCardData, metadata_load

from epo_trl import __version__
from epo_trl.bounds import copy_options
from epo_trl.envs.base import TaskSuite
from epo_trl.envs.pool import PooledSuite
from epo_trl.evaluation import EvalReport, Protocol
from epo_trl.evaluation.report_files import report_files
from epo_trl.methods import Methods
from epo_trl.models.adapters import made_from
from epo_trl.models.families import Changed, as_published
from epo_trl.rollout.spec import ResponseArguments
from epo_trl.trainers.config import EPOConfig
from epo_trl.trainers.setup import RolloutRules

CARD = "README.md"
_PAPER = re.compile(r"\[([^\]]+)\]\((https://arxiv\.org/abs/([\d.]+))\)")
_BIBTEX = {
    "2509.22576": """@article{xu2025epo,
  title   = {{EPO}: Entropy-regularized Policy Optimization for {LLM} Agents Reinforcement Learning},
  author  = {Xu, Wujiang and Zhao, Wentian and Wang, Zhenting and Li, Yu-Jhe and Jin, Can and Jin, Mingyu and
             Mei, Kai and Wan, Kun and Metaxas, Dimitris N.},
  journal = {arXiv preprint arXiv:2509.22576},
  year    = {2025}
}"""
}


@dataclass(frozen=True)
class CardFacts:
    """Facts about a trained model for its model card.

    Args:
        method: Training method in Markdown, phrased to follow "trained with".
        suite: Suite that the model was trained on.
        rows: Additional rows of the table of facts.
        options: Prompts and responses, for the example code in the card.
        protocol: Rules of its episode.
    """

    method: str
    suite: TaskSuite
    rows: Mapping[str, str]
    options: ResponseArguments
    protocol: Protocol


def card_facts(args: EPOConfig, methods: Methods, rules: RolloutRules, suite: TaskSuite, group_size: int) -> CardFacts:
    """Returns the facts about a policy trained with RL."""
    protocol = rules.protocol
    episodes = f"{args.generation_batch_size} episodes per RL step, {group_size} per task"
    return CardFacts(
        method=methods.model_card_text(),
        suite=suite.suite if isinstance(suite, PooledSuite) else suite,
        rows={"training": f"{episodes}, up to {args.max_turns} turns", "evaluation": protocol_row(protocol)},
        options=copy_options(ResponseArguments, args),
        protocol=protocol,
    )


class OwnModelCard:
    """Mixin that replaces TRL's model card in every folder that a trainer saves a model to.

    TRL's card cites the paper of the parent class and shows a sample question that does not suit an agent.
    """

    args: Any
    model: Any
    state: Any
    best_step: int | None = None  # step of the best evaluation, if its weights were loaded at the end
    without_noise: Changed = []  # what `turn_off_noise` has changed in the configuration that is saved
    _tag_names: list[str]

    @property
    def step_of_weights(self) -> int:
        """Number of optimizer steps of the model's weights."""
        return self.state.global_step if self.best_step is None else self.best_step

    def card_facts(self) -> CardFacts:
        """Returns the facts for the card."""
        raise NotImplementedError

    def create_model_card(self, model_name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Writes the card to `output_dir`, with TRL's tags."""
        super().create_model_card(model_name, *args, **kwargs)  # type: ignore[misc]
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            write_card(self, Path(self.args.output_dir))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with as_published(self.without_noise):
            super()._save(output_dir, state_dict)  # type: ignore[misc]
        if self.args.should_save:
            write_card(self, Path(output_dir if output_dir is not None else self.args.output_dir))


def write_card(trainer: Any, folder: Path) -> None:
    """Writes the card of the trainer's current model, keeping the tags of the run's existing card."""
    base = trainer.model.config.name_or_path or ""
    name = (trainer.args.hub_model_id or str(Path(trainer.args.output_dir).resolve())).split("/")[-1]
    data = ModelCardData(
        model_name=name,
        base_model=base if _is_hub_id(base) else None,
        library_name="peft" if is_peft_model(trainer.model) else "transformers",
        pipeline_tag="text-generation",
        tags=sorted({*trainer._tag_names, *_tags(Path(trainer.args.output_dir) / CARD)}),
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_text(trainer, name, base)}").save(folder / CARD)


def _tags(card: Path) -> list[str]:
    """Returns the tags of a card, if there is one that can be read."""
    try:
        tags = (metadata_load(card) or {}).get("tags")
    except (OSError, ValueError, yaml.YAMLError):
        return []  # a damaged card must not prevent saving the checkpoint
    return [str(tag) for tag in tags] if isinstance(tags, list) else []


def _text(trainer: Any, name: str, base: str) -> str:
    facts: CardFacts = trainer.card_facts()
    adapter, step = is_peft_model(trainer.model), trainer.step_of_weights
    best = "" if trainer.best_step is None else f", the best by `{trainer.args.metric_for_best_model}`"
    rows = {
        "method": facts.method,
        "base model": _described(base),
        "weights": "a LoRA adapter on the base model" if adapter else "full model",
        "environment": f"`{facts.suite.name}`" + "".join(f", {k}: `{v}`" for k, v in facts.suite.settings.items()),
        **facts.rows,
        "optimizer steps": f"{step} of {trainer.state.max_steps}{best}",
        "learning rate": f"{trainer.args.learning_rate:g}",
        "made with": f"epo_trl {__version__}, TRL {version('trl')}, transformers {version('transformers')}, "
        f"torch {version('torch')}",
    }
    table = "\n".join(["| | |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in rows.items())])
    return (
        f"# {name}\n\nA language-model agent for the text environment `{facts.suite.name}`, trained with "
        f"{facts.method} by [TRL](https://github.com/huggingface/trl).\n\n{table}\n\n"
        f"## Results\n\n{_results(Path(trainer.args.output_dir), step)}\n\n"
        f"## Use\n\n{_use(facts, adapter)}\n\n## Citation\n\n{citation(facts.method)}\n"
    )


def _is_hub_id(name: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()


def _described(base: str) -> str:
    if not base:
        return "none: trained from scratch"
    if _is_hub_id(base):
        return f"[{base}](https://huggingface.co/{base})"
    source = made_from(Path(base))
    made = f", made from `{_short_name(source[0])}`" if source else ""
    return f"`{_short_name(base)}`, a local folder{made}"


def _arguments_left_out(suite: TaskSuite) -> str:
    """Returns a comment if a suite made in Python may have arguments that its settings lack."""
    if suite.made_by or (is_dataclass(suite) and {f.name for f in fields(suite) if f.init} <= suite.settings.keys()):
        return ""
    return "  # with the other arguments of your training"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def protocol_row(protocol: Protocol) -> str:
    """Returns a one-line description of a protocol: its name and its settings."""
    context = f"{protocol.history_length} past turns" if protocol.is_windowed else "the whole episode"
    return (
        f"`{protocol.name}`: {protocol.max_turns} turns, temperature {protocol.temperature:g}, {protocol.context} "
        f"context, {context} in the prompt, success by `{protocol.success_rule}`"
    )


def _results(run_dir: Path, step: int) -> str:
    """Returns a table of the first and the last evaluation of the run up to a step."""
    upto = [item for item in report_files(run_dir).items() if item[0] <= step]
    lines = []
    for at, path in dict.fromkeys([*upto[:1], *upto[-1:]]):
        for report in _reports(path):
            low, high = report.success_interval
            lines.append(
                f"| {at} | {report.split} | {100 * report.success_rate:.1f} % | {100 * low:.1f} to "
                f"{100 * high:.1f} % | {report.episodes} | `{report.protocol.name}` on `{report.suite}` |"
            )
    if not lines:
        return "Not evaluated in this run."
    head = "| optimizer step | list | success | 95 % interval | episodes | protocol |\n|---|---|---|---|---|---|\n"
    return (
        head
        + "\n".join(lines)
        + "\n\nOne episode per task of a fixed list. Intervals are Wilson intervals. Results under another protocol or "
        "suite are not comparable."
    )


def _reports(path: Path) -> list[EvalReport]:
    try:
        return [EvalReport.from_dict(report) for report in json.loads(path.read_text(encoding="utf-8"))["reports"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # a damaged report must not prevent saving the checkpoint


def _use(facts: CardFacts, adapter: bool) -> str:
    suite, shown = facts.suite, facts.options.few_shot_file
    options = replace(
        facts.options,
        prompt_template=_short_name(facts.options.template_for(suite)),
        few_shot_file=os.path.basename(shown) if shown else None,
    )
    module, _, maker = (suite.made_by or f"{type(suite).__module__}:{type(suite).__qualname__}").partition(":")
    settings = ", ".join(f"{name}={value!r}" for name, value in suite.settings.items())
    made = f"{maker}({settings}){'.make_suite()' if suite.made_by else ''}{_arguments_left_out(suite)}"
    action = "a tool call" if options.action_format == "tool_calls" else "an action, as in `<action>look</action>`"
    base = ", and with the base model where the adapter names it" if adapter else ""
    prompt = "A prompt is one user message" if facts.protocol.is_windowed else "An episode is one conversation"
    return f"""{prompt} from the template `{options.prompt_template}`; an answer ends with
{action}. With `epo_trl` installed, in this folder{base}:

```python
from trl import ModelConfig

from epo_trl.evaluation import Protocol
from epo_trl.evaluation.play import protocol_context, protocol_settings
from epo_trl.models import load_policy
from epo_trl.models.generate import SamplingPolicy
from epo_trl.rollout import play_episodes
from epo_trl.rollout.spec import ResponseArguments
from {module} import {maker}

suite = {made}
options = {_code(options)}
protocol = {_code(facts.protocol)}
model, tokenizer = load_policy(ModelConfig(".", dtype="auto"), suite, options.prompt_template)
shots = options.few_shot_of(suite, protocol.env_options)
context = protocol_context(protocol, options, suite, tokenizer, shots)
length, temperature = options.max_completion_length, protocol.temperature
policy = SamplingPolicy(model, tokenizer, max_new_tokens=length, temperature=temperature)
context.end_ids = policy.eos_ids
settings = protocol_settings(protocol, require_think=options.require_think)
(episode,) = play_episodes([suite.make_env()], [(suite.task_ids("train")[0], 0)], policy, context, settings)
print(episode.won, [turn.action for turn in episode.turns])
```"""


def _code(options: Any) -> str:
    """Returns the call that creates a dataclass object, without defaults."""
    given = {entry.name: (getattr(options, entry.name), entry.default) for entry in fields(options) if entry.compare}
    changed = {name: value for name, (value, default) in given.items() if value != default and value != {}}
    return f"{type(options).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


def _short_name(template: str) -> str:
    return os.path.basename(os.path.normpath(template)) if os.path.isabs(template) else template


def citation(method: str) -> str:
    """Returns, in Markdown, the papers linked in a method's description, with BibTeX where available.

    Args:
        method: Markdown description of how a model was trained.
    """
    links = {number: f"[{name}]({link})" for name, link, number in _PAPER.findall(method)}
    papers = ", ".join([*links.values(), "[TRL](https://github.com/huggingface/trl#citation)"])
    entries = [_BIBTEX[number] for number in links if number in _BIBTEX]
    bibtex = "\n\n```bibtex\n" + "\n\n".join(entries) + "\n```" if entries else ""
    return f"Please cite the following works: {papers}, and the authors of the environment.{bibtex}"
