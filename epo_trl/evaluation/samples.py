"""Episodes as a table that a person can read."""

from __future__ import annotations

import os
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from epo_trl.types import Episode

FILE_COLUMNS = 160  # of output that goes to a file or a pipe, which has no width of its own
NARROW_COLUMNS = 120


def episode_table(episode: Episode, *, narrow: bool = False) -> Table:
    """Returns one row per turn: what was seen, what was answered, what was done, what it paid.

    Args:
        episode: The episode.
        narrow: Whether the three texts of a turn stand one below the other instead of side by side.
    """
    outcome = "won" if episode.won else f"not won ({episode.stop.value})"
    table = Table(
        title=Text(f"{episode.task_id}: {episode.task}: {outcome}, reward {episode.total_reward:.2f}"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    texts = ("observation, response, action",) if narrow else ("observation", "response", "action")
    for heading in ("turn", "reward", *texts):
        table.add_column(heading, overflow="fold")
    for index, turn in enumerate(episode.turns):
        action = Text(turn.action) if turn.is_valid else Text(f"{turn.action} [{turn.error}]", style="red")
        shown = (Text(turn.observation), Text(turn.response), action)
        paid = f"{turn.reward:.2f}" if turn.reward else ""
        table.add_row(str(index), paid, *((Text("\n").join(shown),) if narrow else shown), end_section=narrow)
    if episode.final_observation:
        table.add_row("", "", Text(episode.final_observation))
    if episode.error:
        table.add_row("", "", Text(episode.error, style="red"))
    return table


def print_episodes(episodes: Iterable[Episode], *, step: int | None = None, console: Console | None = None) -> None:
    """Shows the episodes on the console, as wide as the terminal is."""
    console = console or Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_COLUMNS
    if step is not None:
        console.rule(f"episodes at step {step}")
    for episode in episodes:
        console.print(episode_table(episode, narrow=console.width < NARROW_COLUMNS))
