"""From a response to an action."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

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


def parse_response(text: str, admissible: Iterable[str] | None, *, require_think: bool = True) -> ParsedResponse:
    """Returns the action between `<action>` and `</action>`, checked against the admissible ones.

    Case (of the tags too) and white space do not matter; the environment gets its own spelling. A response is
    well-formed if it has exactly one action and, with `require_think`, a `<think>` block that ends before it begins.

    Args:
        text: The decoded response.
        admissible: The actions that the environment accepts now; `None` if it does not list them. Then any action is
            valid that is not empty, until the environment says otherwise.
        require_think: Whether a response without reasoning is invalid.
    """
    actions = list(_blocks(text, "action"))
    thoughts = list(_blocks(text, "think"))
    thought = _squeeze(thoughts[0].content) if thoughts else ""
    if len(actions) != 1:
        error = "no <action> block" if not actions else f"{len(actions)} <action> blocks"
        return ParsedResponse(_squeeze(text)[-MAX_PASSED_CHARS:], thought, error)
    action = _squeeze(actions[0].content)
    if admissible is None:
        spelling = action[-MAX_PASSED_CHARS:] or None
    else:
        spelling = {_squeeze(a).lower(): a for a in admissible}.get(action.lower())
    if require_think and not (thoughts and thoughts[0].end <= actions[0].start):
        return ParsedResponse(spelling or action[-MAX_PASSED_CHARS:], thought, "no <think> block before the action")
    if spelling is None:
        return ParsedResponse(action[-MAX_PASSED_CHARS:], thought, "not an admissible action")
    return ParsedResponse(spelling, thought)


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
