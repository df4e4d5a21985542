"""Prints episodes in a terminal: a list, worst first, or one in full."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from epo_trl.errors import InputError
from epo_trl.evaluation.samples import NARROW_COLUMNS, episode_table, plain, widened
from epo_trl.watch.page import ENTROPY_NOTE, colour_limit, outcome_label
from epo_trl.watch.sample import Sample, TurnTexts

SHOWN = 20  # rows of a list
TASK_CHARS = 100  # characters of a task in the list
# From low to high entropy; readable on dark and light terminals.
LEVELS = ("", "black on color(230)", "black on color(222)", "black on color(214)", "black on color(208)",
          "white on color(160)")  # fmt: skip


def print_list(samples: Sequence[Sample], console: Console | None = None) -> None:
    """Prints the first `SHOWN` episodes as a table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("K", "outcome", "reward", "turns", "invalid", "entropy", "from", "task"):
        table.add_column(heading, overflow="fold")
    for number, sample in enumerate(samples[:SHOWN], start=1):
        episode = sample.episode
        means = [mean for text in sample.texts if (mean := text.mean_entropy()) is not None]
        table.add_row(
            str(number), outcome_label(episode), f"{episode.total_reward:.2f}", str(len(episode.turns)),
            str(episode.invalid_actions), f"{sum(means) / len(means):.2f}" if means else "",
            plain(f"RL step {sample.rl_step}" if sample.rl_step else sample.split),
            plain((episode.task or episode.task_id)[:TASK_CHARS]),
        )  # fmt: skip
    console = widened(console or Console())
    console.print(table)
    more = f"{len(samples) - SHOWN} more. " if len(samples) > SHOWN else ""
    console.print(f"{more}Use --episode K to show one.", highlight=False)


def print_episode(samples: Sequence[Sample], number: int, console: Console | None = None) -> None:
    """Prints one episode; its tokens are coloured by entropy if the terminal supports colours.

    Raises:
        InputError: If there is no such episode.
    """
    if not 1 <= number <= len(samples):
        raise InputError(f"--episode: expected a number from 1 to {len(samples)}, got {number}")
    sample, top, console = samples[number - 1], colour_limit(samples), widened(console or Console())
    responses = [
        _coloured(text, top) if text.tokens else plain(turn.response)
        for text, turn in zip(sample.texts, sample.episode.turns, strict=True)
    ]
    console.print(episode_table(sample.episode, narrow=console.width < NARROW_COLUMNS, responses=responses))
    means = [text.mean_entropy() for text in sample.texts]
    if any(mean is not None for mean in means):
        shown = " ".join("?" if mean is None else f"{mean:.2f}" for mean in means)
        console.print(f"mean entropy by turn, nats: {shown}", highlight=False)
        if console.color_system:
            boxes = (Text("   ", style=style) for style in LEVELS)
            console.print(ENTROPY_NOTE, highlight=False)
            console.print(Text.assemble("0 ", *boxes, f" {top:.1f} nats or more"))


def _coloured(text: TurnTexts, top: float) -> Text:
    levels = [min(len(LEVELS) - 1, int(len(LEVELS) * value / top)) for value in text.entropy] or [0] * len(text.tokens)
    return Text.assemble(*(plain(token, LEVELS[level]) for token, level in zip(text.tokens, levels, strict=True)))
