"""Compares two evaluations game by game, which needs fewer games than comparing two intervals."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from math import comb
from pathlib import Path
from typing import Any

from epo_trl.errors import InputError, changed_settings, differences
from epo_trl.evaluation.report import EvalReport


def paired_outcomes(first: EvalReport, second: EvalReport) -> tuple[int, ...]:
    """Counts the games that both policies won, only the first, only the second, and neither."""
    won = [(a, b) for (_, a), (_, b) in zip(first.outcomes, second.outcomes, strict=True)]
    return tuple(won.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False)))


def mcnemar(only_first: int, only_second: int) -> float:
    """Returns the two-sided p-value of McNemar's exact test (Q. McNemar, Psychometrika 12, 1947): are flips fair?"""
    flips, fewer = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(comb(flips, wins) for wins in range(fewer + 1)) / 2**flips)


def read_reports(
    path: str, suite: str, lists: Mapping[str, Sequence[str]], games: Mapping[str, Any]
) -> dict[str, EvalReport]:
    """Reads the reports of `epo-trl evaluate --output` by the name of their list, on the tasks of `lists`.

    `games` holds the settings that decide which game an id names: `environment`, and `contents` of each list.

    Raises:
        InputError: If the file is missing or no evaluation, or its games are others.
    """
    try:
        content = json.loads(Path(os.path.expanduser(path)).read_text(encoding="utf-8"))
        reports = {one["split"]: EvalReport.from_dict(one) for one in content["reports"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"compare_to: expected a file written by --output, got {path!r} ({error!r})") from error
    found, here = content.get("settings", {}), games["environment"]
    there, contents = found.get("environment", here), found.get("contents", {})
    differ = differences(there, here)  # a later version may have more settings
    for split, task_ids in lists.items():
        if split not in reports:
            differ.append(f"there is no report on {split!r}")
        elif (reports[split].suite, [name for name, _ in reports[split].outcomes]) != (suite, sorted(task_ids)):
            differ.append(f"{split}: {len(reports[split].outcomes)} games of {reports[split].suite} there")
        elif contents.get(split, games["contents"][split]) != games["contents"][split]:
            differ.append(f"the tasks of {split!r} have other contents")
    if differ:
        raise InputError(f"compare_to: expected the same games of {suite}, got others in {path}: {'; '.join(differ)}")
    return reports


def compare(reports: list[EvalReport], others: dict[str, EvalReport], name: str) -> str:
    """Returns a line for each list: wins by game, McNemar's p-value, and the protocols if they differ.

    `others` are the reports of another policy on the same games, by the name of their list.
    """
    lines = []
    for report in reports:
        other, differ = others[report.split], ""
        if report.protocol != other.protocol:
            differ = f"; protocol {report.protocol.name}, that of the other {other.protocol.name}: "
            differ += ", ".join(changed_settings(other.protocol.rules(), report.protocol.rules()))
        both, this, that, neither = paired_outcomes(report, other)
        lines.append(
            f"{report.split} against {name}: both won {both}, only this {this}, only the other {that}, neither "
            f"{neither}; McNemar's exact test, p = {mcnemar(this, that):.3g}{differ}"
        )
    return "\n".join(lines)
