"""Tables and numbers of a report in Markdown. Names are escaped: they never act as markup."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from epo_trl.lab.study.statistics import Estimate

NOTHING = "–"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table, `""` without rows; the first column is text, the others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n" if rows else ""


def plain(text: str) -> str:
    """Escapes a text so that Markdown shows it unchanged."""
    return re.sub(r"([\\`*_{}\[\]<>()#|~$&])", r"\\\1", text)


def code(text: str) -> str:
    """Formats a text as code, also within a table."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}".replace("|", "\\|")


def number(value: float, digits: int = 2) -> str:
    """Formats a number with `digits` decimals."""
    return f"{value:.{digits}f}" if math.isfinite(value) else NOTHING


def percent(share: float) -> str:
    """Formats a share, for example as `41.0`."""
    return number(100 * share, 1)


def spread(found: Estimate | None) -> str:
    """Formats mean, deviation and the interval, within 0 to 100, for example as `41.0 ± 3.2 (36.1 to 45.9)`."""
    if found is None:
        return NOTHING
    if found.count == 1:
        return percent(found.mean)
    low, high = max(0.0, found.low), min(1.0, found.high)
    return f"{percent(found.mean)} ± {percent(found.deviation)} ({percent(low)} to {percent(high)})"


def points(found: Estimate | None) -> str:
    """Formats a difference in percentage points, for example as `+2.0 (-1.3 to +5.3)`."""
    if found is None:
        return NOTHING
    if found.count == 1:
        return _signed(found.mean)
    return f"{_signed(found.mean)} ({_signed(found.low)} to {_signed(found.high)})"


def _signed(share: float) -> str:
    text = f"{100 * share:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text
