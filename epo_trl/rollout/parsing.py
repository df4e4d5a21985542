"""Parses the action out of a response."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from epo_trl.envs.border import find_action, squeeze

MAX_PASSED_CHARS = 200  # maximum length of an unparsable response or inadmissible action that the environment gets
NOT_ADMISSIBLE = "not an admissible action"


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """The parsed action of a response.

    Args:
        action: Text for the environment; the end of a response that cannot be parsed, or of an inadmissible action.
        thought: Reasoning, `""` if there is none.
        error: Reason why the action is invalid, `""` if it is valid.
    """

    action: str
    thought: str = ""
    error: str = ""

    @property
    def is_valid(self) -> bool:
        """Whether the response is well-formed and the action admissible."""
        return not self.error


@dataclass(frozen=True, slots=True)
class RawResponse:
    """A response of the policy.

    Args:
        ids: Sampled token ids.
        text: Decoded text without special tokens, with a leading `<think>` if the chat template writes it.
        start: Text that the chat template puts between the prompt and the response.
    """

    ids: Sequence[int]
    text: str
    start: str


class ActionFormat(Protocol):
    """Interface of the formats in which a response states its action."""

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]:
        """Arguments for the chat template that describe the format to the policy."""

    @property
    def reply_role(self) -> str:
        """Role of the environment's replies in a concatenated context: `"user"` or `"tool"`."""

    @property
    def tags(self) -> Sequence[str]:
        """Texts that decoding must preserve."""

    def read(self, response: RawResponse, admissible: Iterable[str] | None, *, require_think: bool) -> ParsedResponse:
        """Parses the action of a response, see `parse_response`."""


@dataclass(frozen=True)
class TaggedActions:
    """Actions between `<action>` and `</action>`, see `parse_response`.

    Args:
        verbatim: Whether to pass on unlisted actions unchanged, see `parse_response`.
    """

    verbatim: bool = False
    chat_template_kwargs: ClassVar[Mapping[str, Any]] = {}
    reply_role: ClassVar[str] = "user"
    tags: ClassVar[Sequence[str]] = ("<think>", "</think>", "<action>", "</action>")

    def read(self, response: RawResponse, admissible: Iterable[str] | None, *, require_think: bool) -> ParsedResponse:
        """Parses the action of a response."""
        return parse_response(response.text, admissible, require_think=require_think, verbatim=self.verbatim)


def parse_response(
    text: str, admissible: Iterable[str] | None, *, require_think: bool = True, verbatim: bool = False
) -> ParsedResponse:
    """Parses the action between `<action>` and `</action>` and checks it against the admissible ones.

    Case, also of the tags, and white space are ignored; the environment gets its own spelling. A response is
    well-formed if it has exactly one action and, with `require_think`, a `<think>` block that ends before the action.

    Args:
        text: Decoded response.
        admissible: Actions that the environment currently accepts; `None` if it does not list them. Then any action
            that is not empty is valid unless the environment rejects it.
        require_think: Whether a response without reasoning is invalid.
        verbatim: Whether unlisted actions keep their white space: they may be code or JSON. Otherwise it is collapsed.
    """
    actions = list(_blocks(text, "action"))
    thoughts = list(_blocks(text, "think"))
    thought = squeeze(thoughts[0].content) if thoughts else ""
    if len(actions) != 1:
        error = "no <action> block" if not actions else f"{len(actions)} <action> blocks"
        return ParsedResponse(squeeze(text)[-MAX_PASSED_CHARS:], thought, error)
    action, is_admissible = find_action(actions[0].content, admissible, verbatim=verbatim)
    if not is_admissible:
        action = squeeze(action)[-MAX_PASSED_CHARS:]
    if require_think and not (thoughts and thoughts[0].end <= actions[0].start):
        return ParsedResponse(action, thought, "no <think> block before the action")
    return ParsedResponse(action, thought, "" if is_admissible else NOT_ADMISSIBLE)


class _Block(NamedTuple):
    start: int  # of the opening tag
    content: str
    end: int  # of the closing tag


def _blocks(text: str, tag: str) -> Iterator[_Block]:
    """Yields the text between each opening tag and the next closing tag. A single pattern would be quadratic."""
    opening, closing = (re.compile(f"<{slash}{tag}>", re.IGNORECASE | re.ASCII) for slash in ("", "/"))
    position = 0
    while (start := opening.search(text, position)) and (end := closing.search(text, start.end())):
        yield _Block(start.start(), text[start.end() : end.start()], end.end())
        position = end.end()
