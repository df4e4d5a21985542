"""Shows an episode in a terminal, and asks a person. Texts of environments and policies are escaped: they are data."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from epo_trl.evaluation.samples import plain
from epo_trl.types import Episode, Turn

HELP = "Type an action, or: /actions lists the admissible actions, /3 chooses the third, /quit, /help"
# These words show the help and cost no turn. If an environment has one of them as an action, /N chooses it.
ASKING = {"help", "?", "h", "quit", "exit", "actions"}


class Screen:
    """Writes the course of an episode, and reads the input of a person.

    Args:
        console: Output; by default standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)

    def say(self, text: str, style: str = "") -> None:
        """Writes a text, which may come from an environment or a model."""
        self.console.print(plain(text, style), soft_wrap=True)

    def start(self, task_id: str, info: Mapping[str, Any], max_turns: int, player: str) -> None:
        """Writes the task and the turn limit."""
        self.say(f"task: {info['task']}", "bold")
        self.say(f"{info['task_type']}, {task_id}; at most {max_turns} turns; player: {player}", "dim")

    def prompt(self, text: str) -> None:
        """Writes the prompt of a model."""
        self.console.rule("prompt", style="dim")
        self.say(text, "dim")
        self.console.rule(style="dim")

    def response(self, number: int, turn: Turn, text: str, *, typed: bool) -> None:
        """Writes the response of a turn, and why its action is invalid; only the latter if a person has typed it."""
        if turn.thought and not typed:
            self.say(f"thought: {turn.thought}", "italic")
        if not typed:
            self.say(f"{number}> {turn.action if turn.is_valid else text}", "bold cyan")
        if not turn.is_valid:
            self.say(f"invalid: {turn.error}", "red")

    def outcome(self, observation: str, reward: float, info: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        """Writes the response of the environment to an action; `before` is the info of the previous turn."""
        self.say(observation)
        changes = [f"reward {reward:g}"] if reward else []
        if "score" in info and info["score"] != before.get("score", 0):
            changes.append(f"score {info['score']:g}")
        if changes:
            self.say(", ".join(changes), "yellow")

    def end(self, episode: Episode, reward: float) -> None:
        """Writes the outcome of a finished episode and its return."""
        outcome = "won" if episode.won else f"not won ({episode.stop.value})"
        parts = [f"{outcome} after {turns(len(episode.turns))}", f"reward {reward:g}"]
        parts += [] if episode.score is None else [f"score {episode.score:g}"]
        parts += [f"invalid actions: {episode.invalid_actions}"] if episode.invalid_actions else []
        self.say("; ".join(parts), "bold green" if episode.won else "bold red")

    def ask_action(self, turn: int, info: Mapping[str, Any]) -> str:
        """Asks a person for an action, with help before the first turn.

        Raises:
            EOFError: If the person quits or the input ends.
        """
        actions = info["admissible_actions"]
        if turn == 1:
            self.say(HELP, "dim")
        while True:
            typed = self._ask(turn)
            if typed == "/quit":
                raise EOFError
            if typed == "/actions":
                self._list(actions)
            elif action := chosen_action(typed, actions):
                return action
            else:
                self.say(HELP, "dim")

    def _ask(self, turn: int) -> str:
        try:
            typed = self.console.input(Text(f"{turn}> ", style="bold cyan")).strip()
        except (EOFError, KeyboardInterrupt):
            self.console.print()  # the next output starts on a new line
            raise
        if not sys.stdin.isatty():  # the terminal does not echo a file or a pipe
            self.say(typed)
        return typed

    def _list(self, actions: Sequence[str] | None) -> None:
        if actions is None:
            self.say("This environment does not list its actions.")
        for number, action in enumerate(actions or (), start=1):
            self.say(f"{number:4}  {action}")


def chosen_action(typed: str, actions: Sequence[str] | None) -> str:
    """Returns the action that a person typed or chose by its number; `""` if the input is not an action."""
    if typed.lower() in ASKING:
        return ""
    if not typed.startswith("/"):
        return typed
    number = int(typed[1:]) if typed[1:].isdecimal() else 0
    return actions[number - 1] if actions and 0 < number <= len(actions) else ""


def turns(count: int) -> str:
    """Formats a number of turns."""
    return "1 turn" if count == 1 else f"{count} turns"
