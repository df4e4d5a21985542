"""The result of an audit as a table."""

from __future__ import annotations

from math import isnan

from epo_trl.lab.credit_audit.statistics import Agreement, Comparison


def ranked(comparison: Comparison) -> list[tuple[str, Agreement]]:
    """Returns the credits, the highest correlation first and undefined ones last."""
    return sorted(comparison.agreements.items(), key=lambda item: (isnan(v := item[1].correlation.value), -v))


def make_markdown(comparison: Comparison, title: str) -> str:
    """Returns the table in Markdown, with columns of equal width, and what the numbers rest on."""
    rows = [["credit", "correlation with A*", "gain over grpo", "sign", "no credit"]]
    rows += [
        [name, str(found.correlation), str(found.gain), str(found.sign), f"{found.silent:.0%}"]
        for name, found in ranked(comparison)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    table = ("| " + " | ".join(map(str.ljust, cells, widths)) + " |" for cells in rows)
    return "\n".join([f"# {title}", "", summary(comparison), "", *table]) + "\n"


def summary(comparison: Comparison) -> str:
    """Returns what the numbers rest on."""
    return (
        f"{comparison.turns:,} turns of {comparison.tasks} tasks. A*: standard deviation {comparison.deviation:.3f}, "
        f"standard error of an estimate {comparison.standard_error:.3f}, pooled over all turns; the correlations are "
        f"corrected for it. Sign: of the {comparison.clear_turns:,} turns with |A*| > 0 and at least twice that error. "
        "95 % intervals over tasks: Student's t with the standard error of a bootstrap."
    )
