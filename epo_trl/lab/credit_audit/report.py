"""The result of an audit as a table, a plot and JSON."""

from __future__ import annotations

from math import isnan
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from epo_trl.errors import spelled
from epo_trl.lab.credit_audit.statistics import Agreement, Comparison


def ranked(comparison: Comparison) -> list[tuple[str, Agreement]]:
    """Returns the credits, the highest correlation first and undefined ones last."""
    return sorted(comparison.agreements.items(), key=lambda item: (isnan(v := item[1].correlation.value), -v))


def make_table(comparison: Comparison, title: str) -> Table:
    """Returns the table for a terminal."""
    table = Table(
        title=Text(spelled(title)),
        caption=f"\n{summary(comparison)}",
        caption_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for heading in ("credit", "correlation", "gain over grpo", "sign", "none"):
        table.add_column(heading, justify="left" if heading == "credit" else "right", no_wrap=True)
    for name, found in ranked(comparison):
        table.add_row(name, str(found.correlation), str(found.gain), str(found.sign), f"{found.silent:.0%}")
    return table


def make_markdown(comparison: Comparison, title: str, aborted: int = 0) -> str:
    """Returns the same table in Markdown, and the number of tasks that an error of the environment left out."""
    lines = [f"# {title}", "", summary(comparison), ""]
    lines += [f"Tasks left out for an error of the environment: {aborted}.", ""] if aborted else []
    lines += [
        "| credit | correlation with A* | gain over grpo | sign | no credit |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {found.correlation} | {found.gain} | {found.sign} | {found.silent:.0%} |"
        for name, found in ranked(comparison)
    ]
    return "\n".join(lines) + "\n"


def summary(comparison: Comparison) -> str:
    """Returns what the numbers rest on."""
    return (
        f"{comparison.turns:,} turns of {comparison.tasks} tasks. A*: standard deviation {comparison.deviation:.3f}, "
        f"standard error of an estimate {comparison.standard_error:.3f}, pooled over all turns; the correlations are "
        f"corrected for it. Sign: of the {comparison.clear_turns:,} turns with |A*| > 0 and at least twice that error. "
        "95 % intervals over tasks: Student's t with the standard error of a bootstrap."
    )


def draw(comparison: Comparison, title: str, path: Path) -> None:
    """Draws the correlations with their intervals."""
    rows = [(name, found.correlation) for name, found in ranked(comparison)]
    rows = [(name, found) for name, found in reversed(rows) if not isnan(found.value)]
    figure = Figure(figsize=(7, 1.2 + 0.3 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for height, (_, found) in enumerate(rows):
        axes.plot([found.low, found.high], [height, height], color="tab:blue", linewidth=1.5)
        axes.plot(found.value, height, "o", color="tab:blue")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_xlabel("correlation with the true advantage")
    axes.set_title(title, parse_math=False)
    figure.savefig(path, dpi=150)
