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
from epo_trl.evaluation.protocol import Protocol
from epo_trl.evaluation.report import EvalReport


@dataclass(frozen=True, slots=True)
class PairedOutcomes:
    """How often two policies won the same games.

    Args:
        both: Number of games that both won.
        only_first: Number of games that only the first won.
        only_second: Number of games that only the second won.
        neither: Number of games that neither won.
    """

    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def p_value(self) -> float:
        """Two-sided p-value of McNemar's exact test (Q. McNemar, Psychometrika 12, 1947).

        If the policies were equally good, each game that only one of them won would be a fair coin flip.
        """
        flips, fewer = self.only_first + self.only_second, min(self.only_first, self.only_second)
        return min(1.0, 2 * sum(comb(flips, wins) for wins in range(fewer + 1)) / 2**flips)

    @classmethod
    def of(cls, first: EvalReport, second: EvalReport) -> PairedOutcomes:
        """Counts the outcomes of two reports on the same games."""
        won = [(a, b) for (_, a), (_, b) in zip(first.outcomes, second.outcomes, strict=True)]
        return cls(*(won.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))))


def read_reports(path: str, games: Mapping[str, Any]) -> dict[str, EvalReport]:
    """Reads the reports of `epo-trl evaluate --output` by the name of their list.

    Args:
        path: Path of the file.
        games: Settings that decide which game an id names: `environment`, and `contents` of each list.

    Raises:
        InputError: If the file is missing or no evaluation, or its games had other settings.
    """
    try:
        content = json.loads(Path(os.path.expanduser(path)).read_text(encoding="utf-8"))
        reports = [EvalReport.from_dict(report) for report in content["reports"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"compare_to: expected a file written by --output, got {path!r} ({error})") from error
    _check_same_games(path, content.get("settings", {}), games)
    return {report.split: report for report in reports}


def _check_same_games(path: str, found: Mapping[str, Any], games: Mapping[str, Any]) -> None:
    here = games["environment"]
    there = found.get("environment", here)
    both = there.keys() & here.keys()  # a later version may have more settings
    differ = changed_settings({name: there[name] for name in both}, {name: here[name] for name in both})
    contents = found.get("contents", {})
    differ += [
        f"the tasks of {split!r} have other contents"
        for split, content in games["contents"].items()
        if isinstance(contents, Mapping) and contents.get(split, content) != content
    ]
    if differ:
        raise InputError(
            f"compare_to: expected the same games, got other ones in {path} ({'; '.join(differ)}); evaluate both "
            "policies with the same settings of the environment"
        )


def check_games(reports: Mapping[str, EvalReport], suite: str, lists: Mapping[str, Sequence[str]], path: str) -> None:
    """Checks that reports have the outcome of each game of some lists.

    Args:
        reports: Reports by the name of their list.
        suite: Name of the suite.
        lists: Task ids by the name of their list.
        path: Path of the reports.

    Raises:
        InputError: If a list is missing, or its games are others.
    """
    for split, task_ids in lists.items():
        if split not in reports:
            raise InputError(f"compare_to: expected a report on {split!r}, got {[*reports]} in {path}")
        other = reports[split]
        names = [name for name, _ in other.outcomes]
        if (other.suite, names) != (suite, sorted(task_ids)):
            raise InputError(
                f"compare_to: expected the same games, got other ones for {split} ({suite}: {len(task_ids)} games, "
                f"{other.suite}: {len(names)})"
            )


def compare(reports: list[EvalReport], others: dict[str, EvalReport], name: str) -> str:
    """Returns a line for each list: wins by game, McNemar's p-value, and the protocols if they differ.

    Args:
        reports: Reports of this evaluation.
        others: Reports of another policy, by the name of their list.
        name: Name of the others, whose games are the same (`check_games`).
    """
    lines = []
    for report in reports:
        other = others[report.split]
        counts, differ = PairedOutcomes.of(report, other), _difference(report.protocol, other.protocol)
        lines.append(
            f"{report.split} against {name}: both won {counts.both}, only this {counts.only_first}, only the other "
            f"{counts.only_second}, neither {counts.neither}; McNemar's exact test, p = {counts.p_value:.3g}{differ}"
        )
    return "\n".join(lines)


def _difference(here: Protocol, there: Protocol) -> str:
    """Describes how two protocols differ; returns `""` if they do not."""
    if here == there:
        return ""
    if here.name != there.name:
        return f"; protocol {here.name}, that of the other {there.name}"
    return f"; two protocols are named {here.name}: {', '.join(changed_settings(there.rules(), here.rules()))}"
