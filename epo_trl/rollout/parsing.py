"""From a response to an action."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

_SPACES = re.compile(r"\s+")
MAX_PASSED_CHARS = 200  # of an unparsable response that is handed to the environment


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """The action in a response.

    Args:
        action: Text to hand to the environment. Of an unparsable response, its end.
        thought: The reasoning, `""` if there is none.
        error: Why the action is not valid, `""` if it is.
    """

    action: str
    thought: str = ""
    error: str = ""

    @property
    def is_valid(self) -> bool:
        """Whether the response was well-formed and the action admissible."""
        return not self.error


@dataclass(frozen=True, slots=True)
class Response:
    """What the policy said.

    Args:
        ids: Token ids as they were sampled.
        text: Decoded without special tokens, after `<think>` if the chat template has already written that.
        start: The text that the chat template put between the prompt and the response.
    """

    ids: Sequence[int]
    text: str
    start: str


class ActionFormat(Protocol):
    """How a response names its action."""

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]:
        """What the chat template is given to tell the policy of it."""

    @property
    def reply_role(self) -> str:
        """Who says, in a concatenated context, what the environment answers: `"user"` or `"tool"`."""

    @property
    def tags(self) -> Sequence[str]:
        """Texts that decoding must not lose."""

    def read(self, response: Response, admissible: Iterable[str] | None, *, require_think: bool) -> ParsedResponse:
        """Returns the action of a response, as `parse_response` does."""


@dataclass(frozen=True)
class TaggedActions:
    """Actions stand between `<action>` and `</action>`, see `parse_response`.

    Args:
        verbatim: See there.
    """

    verbatim: bool = False
    chat_template_kwargs: ClassVar[Mapping[str, Any]] = {}
    reply_role: ClassVar[str] = "user"
    tags: ClassVar[Sequence[str]] = ("<think>", "</think>", "<action>", "</action>")

    def read(self, response: Response, admissible: Iterable[str] | None, *, require_think: bool) -> ParsedResponse:
        """Returns the action of a response."""
        return parse_response(response.text, admissible, require_think=require_think, verbatim=self.verbatim)


def parse_response(
    text: str, admissible: Iterable[str] | None, *, require_think: bool = True, verbatim: bool = False
) -> ParsedResponse:
    """Returns the action between `<action>` and `</action>`, checked against the admissible ones.

    Case (of the tags too) and white space do not matter; the environment gets its own spelling. A response is
    well-formed if it has exactly one action and, with `require_think`, a `<think>` block that ends before it begins.

    Args:
        text: The decoded response.
        admissible: The actions that the environment accepts now; `None` if it does not list them. Then any action is
            valid that is not empty, until the environment says otherwise.
        require_think: Whether a response without reasoning is invalid.
        verbatim: Whether an action that is not in a list is passed on whole, white space inside it too: it may be code
            or JSON. Otherwise white space is squeezed, and of a long text the end is passed on.
    """
    actions = list(_blocks(text, "action"))
    thoughts = list(_blocks(text, "think"))
    thought = _squeeze(thoughts[0].content) if thoughts else ""
    if len(actions) != 1:
        error = "no <action> block" if not actions else f"{len(actions)} <action> blocks"
        return ParsedResponse(_squeeze(text)[-MAX_PASSED_CHARS:], thought, error)
    action = _squeeze(actions[0].content)
    if admissible is None:
        spelling = (actions[0].content.strip() if verbatim else action[-MAX_PASSED_CHARS:]) or None
    else:
        spelling = admissible_spelling(action, admissible)
    if require_think and not (thoughts and thoughts[0].end <= actions[0].start):
        return ParsedResponse(spelling or action[-MAX_PASSED_CHARS:], thought, "no <think> block before the action")
    if spelling is None:
        return ParsedResponse(action[-MAX_PASSED_CHARS:], thought, "not an admissible action")
    return ParsedResponse(spelling, thought)


def admissible_spelling(action: str, admissible: Iterable[str]) -> str | None:
    """Returns the admissible action that is meant: the one that is spelled so, else one that differs in case.

    Args:
        action: With its white space squeezed.
        admissible: The actions that the environment accepts now.
    """
    squeezed = {_squeeze(known): known for known in admissible}
    return squeezed.get(action) or {known.lower(): squeezed[known] for known in squeezed}.get(action.lower())


class _Block(NamedTuple):
    start: int  # of the opening tag
    content: str
    end: int  # of the closing tag


def _blocks(text: str, tag: str) -> Iterator[_Block]:
    """Yields what lies between an opening tag and the next closing one. One pattern for both would be quadratic."""
    opening, closing = (re.compile(f"<{slash}{tag}>", re.IGNORECASE | re.ASCII) for slash in ("", "/"))
    position = 0
    while (start := opening.search(text, position)) and (end := closing.search(text, start.end())):
        yield _Block(start.start(), text[start.end() : end.start()], end.end())
        position = end.end()


def _squeeze(text: str) -> str:
    return _SPACES.sub(" ", text).strip()
