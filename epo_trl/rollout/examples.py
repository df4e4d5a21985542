"""Past turns in prompts: those of the episode itself and of example episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
