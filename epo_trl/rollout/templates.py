"""Prompt templates: plain text files with `{field}` placeholders that users can replace."""

from __future__ import annotations

import json
import os
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from epo_trl.errors import InputError

TEMPLATES = Path(__file__).parent.parent / "templates"
OPTIONAL_PART = "example"
PARTS = ("first", "next", "history", "followup", OPTIONAL_PART)
# Fields that the rollout fills, with a value of their type, whatever the environment calls by these names. In prompts
# (all parts but `history` and `example`), every key of the environment's `info` is also a field.
_PROMPT: dict[str, Any] = {"observation": "", "turn": 1, "turns_taken": 1}
_FIELDS: dict[str, dict[str, Any]] = {
    "first": {**_PROMPT, "examples": ""},
    "next": {**_PROMPT, "examples": "", "history": "", "history_length": 1},
    "history": {"turn": 1, "observation": "", "action": "", "thought": ""},
    "followup": _PROMPT,
    "example": {"number": 1, "task": "", "history": ""},
}


class PastTurn(NamedTuple):
    """A turn as later prompts show it: the observation, the action, and the thought that led to it."""

    observation: str
    action: str
    thought: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """A solved episode shown in the first prompt, formatted by the prompt template."""

    task: str
    turns: tuple[PastTurn, ...]


@dataclass(frozen=True, slots=True)
class FewShot:
    """Examples in front of the first prompt."""

    examples: tuple[Example, ...] = ()

    @property
    def label(self) -> str:
        """Their number and the first digits of a checksum, such as `"2-9f86d081"`; `""` for none."""
        if not self.examples:
            return ""
        content = json.dumps([astuple(example) for example in self.examples])
        return f"{len(self.examples)}-{sha256(content.encode()).hexdigest()[:8]}"


class TemplateError(InputError):
    """A template file is missing, uses an unknown field, or lacks a required one."""


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """The wording of the prompts of one environment."""

    name: str  # or the folder, for messages
    first: str  # prompt of the first turn
    next: str  # prompt of every later turn in windowed context
    history: str  # one past turn inside `{history}`
    followup: str  # message of every later turn in concatenated context, which already holds the history
    example: str = ""  # one example episode inside `{examples}`, if the prompt has that placeholder

    @classmethod
    def load(cls, name_or_path: str | Path) -> PromptTemplate:
        """Loads the template of that name (in `epo_trl/templates`) or, for any other text, from that folder."""
        shipped = {path.name: path for path in TEMPLATES.iterdir() if path.is_dir()}
        folder = shipped.get(str(name_or_path), Path(os.path.expanduser(name_or_path)))
        if not folder.is_dir():
            known = ", ".join(sorted(shipped))
            raise TemplateError(
                f"prompt_template: got {str(name_or_path)!r}; expected one of {known}, or a folder that holds "
                + ", ".join(f"{part}.txt" for part in PARTS if part != OPTIONAL_PART)
            )
        texts = {}
        for part in PARTS:
            path = folder / f"{part}.txt"
            if part == OPTIONAL_PART and not path.is_file():
                continue
            texts[part] = path.read_text(encoding="utf-8-sig").rstrip("\n")
            fields = _fields(texts[part], path)
            if part in ("first", "next") and "task" not in fields:
                raise TemplateError(f"prompt_template: {path} never shows {{task}}")
        return cls(str(name_or_path), **texts)

    def checksums(self) -> dict[str, str]:
        """Returns a checksum of the text of each part. It does not depend on the folder."""
        return {part: f"sha256 {sha256(getattr(self, part).encode()).hexdigest()[:12]}" for part in PARTS}

    def written(self, write: Callable[[str], str]) -> PromptTemplate:
        """Returns the template with `write` applied to its own text, without the placeholders."""
        return replace(self, **{part: rewrite(getattr(self, part), write) for part in PARTS})

    def past(self, turns: Sequence[tuple[str, ...]], first: int = 1) -> str:
        """Formats past turns, with the fields of `PastTurn`; `first` is the number of the first one in its episode."""
        numbered = enumerate(turns, start=first)
        return "\n".join(render(self.history, {"turn": n, **PastTurn(*turn)._asdict()}) for n, turn in numbered)

    def shown(self, examples: Sequence[Example]) -> str:
        """Formats the examples for `{examples}`, each followed by an empty line."""
        texts = (
            render(self.example, {"number": number, "task": example.task, "history": self.past(example.turns)})
            for number, example in enumerate(examples, start=1)
        )
        return "".join(f"{text}\n\n" for text in texts)

    def check_examples(self, parts: Sequence[str]) -> None:
        """Raises `TemplateError` if one of the parts lacks `{examples}`, or `example.txt` is missing."""
        lacks = [f"{part}.txt" for part in parts if "examples" not in _fields(getattr(self, part), f"{part}.txt")]
        if lacks or not self.example:
            lack = f"{lacks[0]} shows no {{examples}}" if lacks else "it has no example.txt to format them"
            raise TemplateError(
                f"prompt_template: expected one with examples, such as 'react', got {self.name!r}: {lack}"
            )

    def check(self, info: Mapping[str, Any]) -> None:
        """Raises `TemplateError` if a file uses a field that nothing provides, or in a format that its value lacks."""
        for part, values in _FIELDS.items():
            if part not in ("history", "example"):
                values = {"task": "", "admissible_actions": (), **info, **values}
            given = {name: value for name, value in values.items() if value is not None}
            try:
                render(getattr(self, part), given)
            except Exception as error:  # a value of the environment may raise any
                raise TemplateError(
                    f"prompt_template {self.name!r}, {part}.txt: expected fields from {', '.join(sorted(given))}, each "
                    f"in a format of its value, got {error!r}"
                ) from error


class _Listing(tuple):
    """A list in a prompt. The format spec of its placeholder is the separator of the items, by default `, `."""

    def __format__(self, separator: str) -> str:
        return (separator or ", ").join(map(str, self))


def render(text: str, fields: Mapping[str, Any]) -> str:
    """Fills the fields of the text.

    A list or tuple is joined by commas, or by the format spec of the placeholder: `{actions: | }` joins by ` | `.
    """
    return text.format_map({k: _Listing(v) if isinstance(v, tuple | list) else v for k, v in fields.items()})


def rewrite(text: str, write: Callable[[str], str]) -> str:
    """Applies `write` to a template's own text and keeps its placeholders."""
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
