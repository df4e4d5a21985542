"""Model cards with the method and its papers, base model, environment, protocol and results."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard, ModelCardData

from epo_trl import __version__
from epo_trl.evaluation import EvalReport
from epo_trl.evaluation.report import report_files
from epo_trl.models.families import Changed, as_published

CARD = "README.md"
_PAPER = re.compile(r"\[[^\]]+\]\(https://arxiv\.org/abs/[\d.]+\)")


class OwnModelCard:
    """Mixin that replaces TRL's model card in every folder that a trainer saves a model to.

    TRL's card cites the paper of the parent class and shows a sample question that does not suit an agent.
    """

    args: Any
    model: Any
    state: Any
    best_step: int | None = None  # step of the best evaluation, if its weights were loaded at the end
    without_noise: Changed = []  # what `turn_off_noise` has changed in the configuration that is saved
    card_tags: Sequence[str]

    @property
    def step_of_weights(self) -> int:
        """Number of optimizer steps of the model's weights."""
        return self.state.global_step if self.best_step is None else self.best_step

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes the card to `output_dir`."""
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            write_card(self, Path(self.args.output_dir))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with as_published(self.without_noise):
            super()._save(output_dir, state_dict)  # type: ignore[misc]
        if self.args.should_save:
            write_card(self, Path(output_dir if output_dir is not None else self.args.output_dir))


def write_card(trainer: Any, folder: Path) -> None:
    """Writes the card of the trainer's current model.

    `card_rows()` of the trainer returns rows of its table. `method` is Markdown, phrased to follow "trained with".
    """
    args, suite, adapter = trainer.args, trainer.suite, is_peft_model(trainer.model)
    base, step = trainer.model.config.name_or_path or "", trainer.step_of_weights
    name = (args.hub_model_id or str(Path(args.output_dir).resolve())).split("/")[-1]
    best = "" if trainer.best_step is None else f", the best by `{args.metric_for_best_model}`"
    versions = [f"{one} {version(one)}" for one in ("trl", "transformers", "torch")]
    own = trainer.card_rows()
    method = own["method"]
    rows = {
        "method": method,
        "base model": _described(base),
        "weights": "a LoRA adapter on the base model" if adapter else "full model",
        "environment": ", ".join([f"`{suite.name}`", *(f"{key}: `{value}`" for key, value in suite.settings.items())]),
        **own,
        "optimizer steps": f"{step} of {trainer.state.max_steps}{best}",
        "learning rate": f"{args.learning_rate:g}",
        "made with": ", ".join([f"epo_trl {__version__}", *versions]),
    }
    cells = {key: " ".join(value.replace("|", "\\|").split()) for key, value in rows.items()}
    table = ["| | |", "|---|---|", *(f"| {key} | {cell} |" for key, cell in cells.items())]
    papers = dict.fromkeys([*_PAPER.findall(method), "[TRL](https://github.com/huggingface/trl#citation)"])
    text = (
        f"# {name}\n\nA language-model agent for the text environment `{suite.name}`, trained with {method} by "
        "[TRL](https://github.com/huggingface/trl). `epo_trl.models.load_policy` loads it, `epo-trl evaluate` plays "
        "with it.\n\n" + "\n".join(table) + "\n\n"
        f"## Results\n\n{_results(Path(args.output_dir), step)}\n\n"
        f"## Citation\n\nPlease cite {', '.join(papers)}, and the authors of the environment.\n"
    )
    data = ModelCardData(
        model_name=name,
        base_model=base if _is_hub_id(base) else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=list(trainer.card_tags),
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(folder / CARD)


def _is_hub_id(name: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()


def _described(base: str) -> str:
    if not base:
        return "none: trained from scratch"
    if _is_hub_id(base):
        return f"[{base}](https://huggingface.co/{base})"
    return f"`{Path(base).name}`, a local folder"


def _results(run_dir: Path, step: int) -> str:
    """Returns a table of the first and the last evaluation of the run up to a step."""
    upto = [item for item in report_files(run_dir).items() if item[0] <= step]
    lines, notes = [], []
    for at, path in dict.fromkeys([*upto[:1], *upto[-1:]]):
        for report in map(EvalReport.from_dict, json.loads(path.read_text(encoding="utf-8"))["reports"]):
            low, high = report.success_interval
            notes.append(f"After step {at}, {report.split}: {report.notes()}.")
            lines.append(
                f"| {at} | {report.split} | {100 * report.success_rate:.1f} % | {100 * low:.1f} to "
                f"{100 * high:.1f} % | {report.episodes} | `{report.protocol.name}` on `{report.suite}` |"
            )
    if not lines:
        return "Not evaluated in this run."
    head = ["| optimizer step | list | success | 95 % interval | episodes | protocol |", "|---|---|---|---|---|---|"]
    said = " ".join(["One episode per task of a fixed list, with Wilson intervals.", *notes])
    return "\n".join([*head, *lines, "", said])
