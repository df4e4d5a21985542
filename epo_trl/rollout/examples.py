"""What a prompt can show of turns that have been played: those of the episode itself, and those of example episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class PastTurn(NamedTuple):
    """A turn as later prompts show it: what was seen, what was done, and the thought in between."""

    observation: str
    action: str
    thought: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """A solved episode that stands in front of the first prompt. A template words it."""

    task: str
    turns: tuple[PastTurn, ...]
