"""Compares two evaluations game by game, which needs fewer games than comparing two intervals."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

from epo_trl.errors import InputError, changed_settings
from epo_trl.evaluation.report import EvalReport


@dataclass(frozen=True, slots=True)
class PairedOutcomes:
    """Numbers of games that both policies won, only one of them, or neither."""

    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def p_value(self) -> float:
        """Two-sided p-value of McNemar's exact test (Q. McNemar, Psychometrika 12, 1947): are the flips fair?"""
        flips, fewer = self.only_first + self.only_second, min(self.only_first, self.only_second)
        return min(1.0, 2 * sum(comb(flips, wins) for wins in range(fewer + 1)) / 2**flips)

    @classmethod
    def of(cls, first: EvalReport, second: EvalReport) -> PairedOutcomes:
        """Counts the outcomes of two reports on the same games."""
        won = [(a, b) for (_, a), (_, b) in zip(first.outcomes, second.outcomes, strict=True)]
        return cls(*(won.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))))


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
    both = there.keys() & here.keys()  # a later version may have more settings
    differ = changed_settings({name: there[name] for name in both}, {name: here[name] for name in both})
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
        counts = PairedOutcomes.of(report, other)
        lines.append(
            f"{report.split} against {name}: both won {counts.both}, only this {counts.only_first}, only the other "
            f"{counts.only_second}, neither {counts.neither}; McNemar's exact test, p = {counts.p_value:.3g}{differ}"
        )
    return "\n".join(lines)
