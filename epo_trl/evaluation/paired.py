"""Compares two evaluations game by game, which needs fewer games than comparing two intervals."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import comb
from pathlib import Path

from epo_trl.errors import InputError
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
        """Counts the outcomes of two reports on the same list.

        Raises:
            InputError: If a report has no outcomes by game, or the lists differ.
        """
        names = [[name for name, _ in report.outcomes] for report in (first, second)]
        if not all(names):
            raise InputError(
                f"compare_to: expected reports with the outcome of each game, got none for {first.split}; evaluate the "
                "model again"
            )
        if names[0] != names[1]:
            raise InputError(
                f"compare_to: expected the same games, got other ones for {first.split} "
                f"({first.suite}: {len(names[0])} games, {second.suite}: {len(names[1])})"
            )
        won = [(a, b) for (_, a), (_, b) in zip(first.outcomes, second.outcomes, strict=True)]
        return cls(*(won.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))))


def read_reports(path: str) -> dict[str, EvalReport]:
    """Reads the reports of `epo-trl evaluate --output` by the name of their list.

    Raises:
        InputError: If the file is missing or no evaluation.
    """
    try:
        reports = [EvalReport.from_dict(report) for report in json.loads(Path(path).read_text())["reports"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"compare_to: expected a file written by --output, got {path!r} ({error})") from error
    return {report.split: report for report in reports}


def compare(reports: list[EvalReport], others: dict[str, EvalReport], name: str) -> str:
    """Returns a line for each list: wins by game, and McNemar's p-value.

    Args:
        reports: Reports of this evaluation.
        others: Reports of another policy, by the name of their list.
        name: Name of the others.

    Raises:
        InputError: If the others lack a list or played other games.
    """
    lines = []
    for report in reports:
        if report.split not in others:
            raise InputError(f"compare_to: expected a report on {report.split!r}, got {[*others]} in {name}")
        counts = PairedOutcomes.of(report, others[report.split])
        lines.append(
            f"{report.split} against {name}: both won {counts.both}, only this {counts.only_first}, only the other "
            f"{counts.only_second}, neither {counts.neither}; McNemar's exact test, p = {counts.p_value:.3g}"
        )
    return "\n".join(lines)
