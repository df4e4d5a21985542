"""Formats the findings as a table, as plain text, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby

from epo_trl.doctor.finding import Finding, State

STYLES = {State.OK: "green", State.MISSING: "yellow", State.BROKEN: "bold red", State.NOT_ASKED: "dim"}


def one_line(text: str) -> str:
    """Removes line breaks and control characters, which error messages and folder names may contain."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def conclusion(findings: Iterable[Finding]) -> str:
    """Returns the last line of the report."""
    fatal = [finding.name for finding in findings if finding.is_fatal]
    if fatal:
        return f"No run can start until these are fixed: {', '.join(fatal)}."
    return "All requirements of every run are met."


def as_json(findings: Sequence[Finding]) -> str:
    """Returns `{"ok": ..., "findings": [...]}`. Each finding has the fields of `Finding`."""
    ok = not any(finding.is_fatal for finding in findings)
    return json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]}, indent=2)


def as_text(findings: Sequence[Finding]) -> str:
    """Returns one line for each finding, followed by a line with the command that fixes it, if any."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for part, group in groupby(findings, lambda finding: finding.part):
        lines.append(part)
        for finding in group:
            lines.append(f"  {finding.state:9}  {finding.name:{width}}  {one_line(finding.message)}")
            if finding.fix:
                lines.append(f"{'':{width + 15}}fix: {one_line(finding.fix)}")
    return "\n".join([*lines, "", conclusion(findings)])


def print_table(findings: Sequence[Finding]) -> None:
    """Prints the findings as a table, then the commands that fix them, one per line so that they can be copied."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    for heading in ("", "", "found"):
        table.add_column(heading, overflow="fold")
    for part, group in groupby(findings, lambda finding: finding.part):
        table.add_row(Text(part, style="bold"))
        for finding in group:
            table.add_row(
                Text(f"  {finding.name}"),
                Text(finding.state, style=STYLES[finding.state]),
                Text(one_line(finding.message)),
            )
    console = Console()
    console.print(table)
    width = max(len(finding.name) for finding in findings)
    fixes = [(finding.name, one_line(finding.fix)) for finding in findings if finding.fix]
    if fixes:
        console.print(Text("fixes", style="bold"))
    for name, fix in fixes:
        console.print(Text(f"  {name:{width}}  ").append(fix, style="cyan"), soft_wrap=True)
    console.print()
    console.print(Text(conclusion(findings), style="bold"))
