"""Prompt templates: four plain text files with `{field}` placeholders, which a user can replace."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent.parent / "templates"
PARTS = ("first", "next", "history", "followup")
# Fields that the rollout fills; every key of the environment's `info` is a field as well, except in `history`.
FIELDS = frozenset({"task", "observation", "turn", "turns_taken", "admissible_actions"})
NEXT_FIELDS = FIELDS | {"history", "history_length"}
HISTORY_FIELDS = frozenset({"turn", "observation", "action"})


class TemplateError(ValueError):
    """A template file is missing, names a field that does not exist, or leaves out one that it needs."""


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """The wording of the prompts of one environment.

    Args:
        name: Where it came from, for messages.
        first: The prompt of the first turn.
        next: Windowed context: the prompt of every later turn.
        history: Windowed context: how one past turn is shown inside `{history}`.
        followup: Concatenated context: the message of every later turn; the history is in the context already.
    """

    name: str
    first: str
    next: str
    history: str
    followup: str

    @classmethod
    def load(cls, name_or_path: str | Path) -> PromptTemplate:
        """Returns the template of that name (a folder of `epo_trl/templates`) or, for any other text, in that folder.

        Raises:
            TemplateError: If the folder or one of its files is missing or not UTF-8, a text has unbalanced braces, or
                `first` or `next` does not show the task.
        """
        shipped = {path.name: path for path in TEMPLATES.iterdir() if path.is_dir()}
        folder = shipped.get(str(name_or_path), Path(name_or_path))
        if not folder.is_dir():
            known = ", ".join(sorted(shipped))
            raise TemplateError(
                f"prompt_template: got {str(name_or_path)!r}, takes one of {known}, or a folder that holds "
                + ", ".join(f"{part}.txt" for part in PARTS)
            )
        texts = {}
        for part in PARTS:
            path = folder / f"{part}.txt"
            if not path.is_file():
                raise TemplateError(f"prompt_template: {path} is missing")
            try:
                texts[part] = path.read_text(encoding="utf-8").rstrip("\n")
            except UnicodeDecodeError as error:
                raise TemplateError(f"prompt_template: {path} is not UTF-8 text: {error}") from error
            fields = _fields(texts[part], path)
            if part in ("first", "next") and "task" not in fields:
                raise TemplateError(f"prompt_template: {path} never shows {{task}}")
        return cls(str(name_or_path), **texts)

    def check(self, info: Mapping[str, Any]) -> None:
        """Raises `TemplateError` if a file names a field that neither the rollout nor the environment provides."""
        provided = set(info)
        for part in PARTS:
            allowed = {"history": HISTORY_FIELDS, "next": NEXT_FIELDS | provided}.get(part, FIELDS | provided)
            shown = _fields(getattr(self, part), f"{part}.txt")
            empty = sorted(name for name in shown if info.get(name, "") is None)
            if empty:
                raise TemplateError(
                    f"prompt_template {self.name!r}, {part}.txt: shows {{{empty[0]}}}, which the environment as it is "
                    "set does not give; take another template or change the environment's settings"
                )
            unknown = shown - allowed
            if unknown:
                raise TemplateError(
                    f"prompt_template {self.name!r}, {part}.txt: unknown field {sorted(unknown)}; "
                    f"takes {', '.join(sorted(allowed))}"
                )


class _Listing(tuple):
    """A list in a prompt. What follows the colon in its placeholder stands between the items, by default a comma."""

    def __format__(self, separator: str) -> str:
        return (separator or ", ").join(self)


def render(text: str, fields: Mapping[str, Any]) -> str:
    """Returns the text with its fields filled.

    A list or tuple is joined by commas, or by what the placeholder says: `{actions: | }` puts ` | ` in between.
    """
    return text.format_map({k: _Listing(v) if isinstance(v, tuple | list) else v for k, v in fields.items()})


def rewrite(text: str, write: Callable[[str], str]) -> str:
    """Returns a template whose own text, all but its placeholders, went through `write`."""
    parts = []
    for literal, name, separator, conversion in string.Formatter().parse(text):
        parts.append(write(literal).replace("{", "{{").replace("}", "}}") if literal else "")
        if name is not None:
            parts.append("{" + name + (f"!{conversion}" if conversion else ""))
            parts.append((f":{write(separator)}" if separator else "") + "}")
    return "".join(parts)


def _fields(text: str, where: str | Path) -> set[str]:
    try:
        return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    except ValueError as error:
        raise TemplateError(f"prompt_template: {where}: {error}; write {{{{ and }}}} for literal braces") from error
