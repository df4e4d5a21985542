"""Prints episodes as readable tables."""

from __future__ import annotations

import os
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from epo_trl.errors import spelled
from epo_trl.types import Episode

FILE_COLUMNS = 160  # width of output to a file or a pipe, which has no width


def plain(text: str, style: str = "") -> Text:
    """Returns the escaped text for `rich`, without markup."""
    return Text(spelled(text), style=style)


def episode_table(episode: Episode) -> Table:
    """Creates a table with one row per turn: reward, observation, response and action."""
    outcome = "won" if episode.won else f"not won ({episode.stop.value})"
    table = Table(
        title=plain(f"{episode.task_id}: {episode.task}: {outcome}, reward {episode.total_reward:.2f}"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("turn", "reward", "observation", "response", "action"):
        table.add_column(heading, overflow="fold")
    for index, turn in enumerate(episode.turns):  # shown counting from 1
        action = plain(turn.action) if turn.is_valid else plain(f"{turn.action} [{turn.error}]", style="red")
        paid = f"{turn.reward:.2f}" if turn.reward else ""
        table.add_row(str(index + 1), paid, plain(turn.observation), plain(turn.response), action)
    if episode.final_observation:
        table.add_row("", "", plain(episode.final_observation))
    if episode.error:
        table.add_row("", "", plain(episode.error, style="red"))
    return table


def print_episodes(episodes: Iterable[Episode], *, step: int | None = None, console: Console | None = None) -> None:
    """Prints the episodes on the console."""
    console = console or Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_COLUMNS
    if step is not None:
        console.rule(f"episodes at step {step}")
    for episode in episodes:
        console.print(episode_table(episode))
