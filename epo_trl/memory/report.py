"""Formats a plan as a table, plain text or JSON."""

from __future__ import annotations

import json
from itertools import groupby

from epo_trl.memory.plan import Plan, Row


def shown(value: float) -> str:
    """Formats a number with three significant digits, or all integer digits."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def as_json(plan: Plan) -> str:
    """Returns `{"title", "fits", "plan": {part: {name: {"value", "unit", "because"}}}, "left_out"}`."""
    parts: dict[str, dict[str, object]] = {}
    for row in plan.rows:
        parts.setdefault(row.part, {})[row.name] = {"value": row.value, "unit": row.unit, "because": row.because}
    content = {"title": plan.title, "fits": plan.fits, "plan": parts, "left_out": list(plan.left_out)}
    return json.dumps(content, indent=2)


def as_text(plan: Plan) -> str:
    """Formats the plan as plain text: one line per number, grouped under headings."""
    width = max(len(row.name) for row in plan.rows)
    lines = [plan.title]
    for part, rows in groupby(plan.rows, lambda row: row.part):
        lines += ["", part]
        lines += [f"  {row.name:{width}}  {_with_unit(row):>16}  {_plain(row.because)}".rstrip() for row in rows]
    return "\n".join([*lines, "", *_notes(plan)])


def print_table(plan: Plan) -> None:
    """Prints the plan as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(plan.title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("rests on", overflow="fold", style="dim")
    for part, rows in groupby(plan.rows, lambda row: row.part):
        table.add_row(Text(part, style="bold"))
        for row in rows:
            wrong = row.because.startswith("DOES NOT")
            style = "bold red" if wrong else "bold" if row.name in ("all", "GPU-hours") else ""
            table.add_row(f"  {row.name}", Text(_with_unit(row), style=style), Text(_plain(row.because)))
        table.add_section()
    console = Console()
    console.print(table)
    for note in _notes(plan):
        console.print(Text(note))


def _with_unit(row: Row) -> str:
    return f"{shown(row.value)} {row.unit}".rstrip()


def _plain(text: str) -> str:
    """Replaces control characters: names of folders and contents of files are untrusted."""
    return "".join(char if char.isprintable() else " " for char in text)


def _notes(plan: Plan) -> list[str]:
    return ["Not in these numbers:", *(f"- {_plain(line)}" for line in plan.left_out)]
