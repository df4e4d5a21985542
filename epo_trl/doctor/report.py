"""The findings as a table, as plain text, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby

from epo_trl.doctor.finding import Finding, State

STYLES = {State.OK: "green", State.MISSING: "yellow", State.BROKEN: "bold red", State.NOT_ASKED: "dim"}


def one_line(text: str) -> str:
    """Returns a text without line breaks and control characters: what an error or a folder's name says is data."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def conclusion(findings: Iterable[Finding]) -> str:
    """Returns the last line."""
    fatal = [finding.name for finding in findings if finding.is_fatal]
    if fatal:
        return f"Nothing can run before this is mended: {', '.join(fatal)}."
    return "What every run needs is here."


def as_json(findings: Sequence[Finding]) -> str:
    """Returns `{"ok": ..., "findings": [...]}`, each finding with the fields of `Finding`."""
    ok = not any(finding.is_fatal for finding in findings)
    return json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]}, indent=2)


def as_text(findings: Sequence[Finding]) -> str:
    """Returns one line for each finding, and one below it for the command that mends it."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for part, group in groupby(findings, lambda finding: finding.part):
        lines.append(part)
        for finding in group:
            lines.append(f"  {finding.state:9}  {finding.name:{width}}  {one_line(finding.says)}")
            if finding.mend:
                lines.append(f"{'':{width + 15}}mend: {one_line(finding.mend)}")
    return "\n".join([*lines, "", conclusion(findings)])


def print_table(findings: Sequence[Finding]) -> None:
    """Shows the findings on a terminal; the commands stand below, each on a line of its own that can be copied."""
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
                Text(one_line(finding.says)),
            )
    console = Console()
    console.print(table)
    width = max(len(finding.name) for finding in findings)
    mends = [(finding.name, one_line(finding.mend)) for finding in findings if finding.mend]
    if mends:
        console.print(Text("what mends it", style="bold"))
    for name, mend in mends:
        console.print(Text(f"  {name:{width}}  ").append(mend, style="cyan"), soft_wrap=True)
    console.print()
    console.print(Text(conclusion(findings), style="bold"))
