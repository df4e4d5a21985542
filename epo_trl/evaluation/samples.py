"""Episodes as a table that a person can read."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from epo_trl.types import Episode


def episode_table(episode: Episode) -> Table:
    """Returns one row per turn: what was seen, what was answered, what was done, what it paid."""
    outcome = "won" if episode.won else f"not won ({episode.stop.value})"
    table = Table(
        title=Text(f"{episode.task_id}: {episode.task}: {outcome}, reward {episode.total_reward:.2f}"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("turn", "observation", "response", "action", "reward"):
        table.add_column(heading, overflow="fold")
    for index, turn in enumerate(episode.turns):
        action = Text(turn.action) if turn.is_valid else Text(f"{turn.action} [{turn.error}]", style="red")
        table.add_row(
            str(index), Text(turn.observation), Text(turn.response), action, f"{turn.reward:.2f}" if turn.reward else ""
        )
    if episode.final_observation:
        table.add_row("", Text(episode.final_observation))
    if episode.error:
        table.add_row("", Text(episode.error, style="red"))
    return table


def print_episodes(episodes: Iterable[Episode], *, step: int | None = None, console: Console | None = None) -> None:
    """Shows the episodes on the console."""
    console = console or Console()
    if step is not None:
        console.rule(f"episodes at step {step}")
    for episode in episodes:
        console.print(episode_table(episode))
