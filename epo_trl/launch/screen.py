"""One episode as a terminal shows it. What an environment or a policy says is shown, never obeyed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from epo_trl.evaluation.samples import plain
from epo_trl.rollout.parsing import ParsedResponse
from epo_trl.types import Episode

HELP = "An action in words, or: /actions lists those that the engine takes now, /3 takes the third, /quit, /help"


class Screen:
    """Writes what happens, and reads what a person does.

    Args:
        console: Where to write; by default standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)

    def say(self, text: str, style: str = "") -> None:
        """Writes a text of anybody's."""
        self.console.print(plain(text, style), soft_wrap=True)

    def start(self, task_id: str, info: Mapping[str, Any], max_turns: int, player: str) -> None:
        """Writes what is to be done."""
        self.say(f"task: {info['task']}", "bold")
        self.say(f"{info['task_type']}, {task_id}; at most {max_turns} turns; player: {player}", "dim")

    def outcome(self, observation: str, reward: float, info: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        """Writes what the environment says to an action.

        Args:
            observation: In words.
            reward: Reward of the step.
            info: Info dictionary of the step.
            before: Observation of the previous turn.
        """
        self.say(observation)
        changes = [f"reward {reward:g}"] if reward else []
        if "score" in info and info["score"] != before.get("score", 0):
            changes.append(f"score {info['score']:g}")
        if changes:
            self.say(", ".join(changes), "yellow")

    def prompt(self, text: str) -> None:
        """Writes what a model reads before its turn."""
        self.console.rule("prompt", style="dim")
        self.say(text, "dim")
        self.console.rule(style="dim")

    def response(self, turn: int, parsed: ParsedResponse, text: str) -> None:
        """Writes what a player who is not in front of the screen has said.

        Args:
            turn: Its number, from 1.
            parsed: The parsed response.
            text: All of it.
        """
        if parsed.thought:
            self.say(f"thought: {parsed.thought}", "italic")
        if parsed.is_valid:
            self.say(f"{turn}> {parsed.action}", "bold cyan")
        else:
            self.say(f"{turn}> {text}", "bold cyan")
            self.invalid(parsed)

    def invalid(self, parsed: ParsedResponse) -> None:
        """Writes why an action is none."""
        self.say(f"not valid: {parsed.error}", "red")

    def ask(self, turn: int) -> str:
        """Returns what a person types.

        Raises:
            EOFError: At the end of the input.
        """
        try:
            said = self.console.input(Text(f"{turn}> ", style="bold cyan")).strip()
        except (EOFError, KeyboardInterrupt):
            self.console.print()  # what comes next is not on the line of the prompt
            raise
        if not sys.stdin.isatty():  # of a file or a pipe the terminal shows nothing
            self.say(said)
        return said

    def actions(self, actions: Sequence[str] | None) -> None:
        """Writes the actions that the engine takes now."""
        if actions is None:
            self.say("This environment does not list its actions.")
        for number, action in enumerate(actions or (), start=1):
            self.say(f"{number:4}  {action}")

    def end(self, episode: Episode, reward: float) -> None:
        """Writes how it ended.

        Args:
            episode: The finished episode.
            reward: Return of the episode.
        """
        outcome = "won" if episode.won else f"not won ({episode.stop.value})"
        parts = [f"{outcome} after {turns(len(episode.turns))}", f"reward {reward:g}"]
        parts += [] if episode.score is None else [f"score {episode.score:g}"]
        parts += [f"invalid actions: {episode.invalid_actions}"] if episode.invalid_actions else []
        self.say("; ".join(parts), "bold green" if episode.won else "bold red")


def turns(count: int) -> str:
    """Returns a number of turns in words."""
    return "1 turn" if count == 1 else f"{count} turns"
