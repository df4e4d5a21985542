"""Evaluation reports: counts over episodes, from which all other numbers are computed, and their files in a run."""

from __future__ import annotations

import io
import math
import os
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from statistics import NormalDist
from typing import Any

from pydantic import TypeAdapter
from rich import box
from rich.console import Console
from rich.table import Table

from epo_trl.evaluation.protocol import Protocol
from epo_trl.evaluation.samples import plain
from epo_trl.types import Episode, StopReason

REPORTS = "evaluations"  # folder in a run's `output_dir`
WAITS = ("wait", "wait1")
UNKNOWN = ""  # the type of a task whose episode was aborted before it began
# Names in `EvalReport.scalars`.
LOWER_IS_BETTER = ("turns", "invalid_actions", "aborted", "seconds", "wait_actions")
_DERIVED = ("episodes", "wins", "success_rate", "success_interval", "macro_success_rate", "mean_turns",
            "invalid_action_rate", "wait_rate", "mean_score", "mean_won_turns", "won_within")  # fmt: skip
TURNS = (10, 15, 20, 50)  # limits at which `won_within` counts: a generous one hides how fast a policy wins


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Computes the bounds of the 95 % Wilson score interval of a rate, both within [0, 1].

        centre = (p + z^2 / 2n) / (1 + z^2 / n),   half-width = z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2)

    with p = successes / n and z the two-sided normal quantile (E. B. Wilson, JASA 22, 1927). Unlike p +- z * sqrt(...)
    it has a positive width at p = 0 and p = 1, and it keeps its coverage at n = 10.

    Args:
        successes: Number of successes, 0 to n.
        n: Number of trials; for 0 the interval is (0.0, 1.0).
    """
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.975)
    rate, shrink = successes / n, 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / shrink
    half_width = z / shrink * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # at p = 0 and p = 1 one bound is exactly 0 or 1; rounding would leave 1e-17
    return 0.0 if successes == 0 else centre - half_width, 1.0 if successes == n else centre + half_width


@dataclass(frozen=True, slots=True)
class TypeCount:
    """Numbers of episodes and wins of one task type."""

    episodes: int
    wins: int

    @property
    def success_rate(self) -> float:
        """Wins over episodes."""
        return self.wins / self.episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """The result of one evaluation. Aborted episodes count as failures and are shown among the stop reasons."""

    protocol: Protocol
    suite: str
    split: str
    types: dict[str, TypeCount]  # by task type; "" for episodes that were aborted before they began
    turns: int
    invalid_turns: int  # turns with an invalid action
    stop_reasons: dict[str, int]  # number of episodes by the value of their `StopReason`
    seconds: float  # wall time
    wait_turns: int = 0  # turns with the action `wait` or `wait1`
    score_sum: float | None = None  # of the final scores, with negative ones as 0; `None` if there are no scores
    outcomes: tuple[tuple[str, bool], ...] = ()  # task id and success of each episode, in the order of the ids
    won_turns: tuple[int, ...] = ()  # of each won episode, ascending; empty in reports of earlier versions

    @classmethod
    def from_episodes(
        cls, episodes: Sequence[Episode], *, protocol: Protocol, suite: str, split: str, seconds: float
    ) -> EvalReport:
        """Creates the report of a list of episodes, at least one."""
        total = Counter(episode.task_type for episode in episodes)
        wins = Counter(episode.task_type for episode in episodes if episode.won)
        stops = Counter(episode.stop for episode in episodes)
        scores = [0.0 if e.stop is StopReason.ABORTED else e.score for e in episodes if e.score is not None]
        return cls(
            protocol=protocol,
            suite=suite,
            split=split,
            types={name: TypeCount(total[name], wins[name]) for name in sorted(total)},
            turns=sum(len(episode.turns) for episode in episodes),
            invalid_turns=sum(episode.invalid_actions for episode in episodes),
            stop_reasons={reason.value: stops[reason] for reason in StopReason if stops[reason]},
            seconds=seconds,
            wait_turns=sum(turn.action.lower() in WAITS for episode in episodes for turn in episode.turns),
            score_sum=sum(max(0.0, score) for score in scores) if scores else None,
            outcomes=tuple(sorted(((e.task_id, e.won) for e in episodes), key=itemgetter(0))),
            won_turns=tuple(sorted(len(episode.turns) for episode in episodes if episode.won)),
        )

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return sum(count.episodes for count in self.types.values())

    @property
    def wins(self) -> int:
        """Number of won episodes."""
        return sum(count.wins for count in self.types.values())

    @property
    def success_rate(self) -> float:
        """Wins over episodes."""
        return self.wins / self.episodes

    @property
    def success_interval(self) -> tuple[float, float]:
        """95 % Wilson interval of `success_rate`."""
        return wilson_interval(self.wins, self.episodes)

    @property
    def macro_success_rate(self) -> float:
        """Mean success rate over the task types, each with equal weight, without unknown types."""
        known = self._known_types or self.types
        return sum(count.success_rate for count in known.values()) / len(known)

    @property
    def _known_types(self) -> dict[str, TypeCount]:
        return {name: count for name, count in self.types.items() if name != UNKNOWN}

    @property
    def mean_turns(self) -> float:
        """Mean number of turns per episode, won or not."""
        return self.turns / self.episodes

    @property
    def invalid_action_rate(self) -> float:
        """Share of turns with an invalid action; 0.0 without turns."""
        return self.invalid_turns / self.turns if self.turns else 0.0

    @property
    def wait_rate(self) -> float:
        """Share of turns that waited; 0.0 without turns."""
        return self.wait_turns / self.turns if self.turns else 0.0

    @property
    def mean_score(self) -> float | None:
        """Mean of the environment's final scores, with negative and aborted ones as 0; `None` if there are none."""
        return None if self.score_sum is None else self.score_sum / self.episodes

    @property
    def mean_won_turns(self) -> float | None:
        """Mean number of turns of the won episodes; `None` if it is unknown."""
        return sum(self.won_turns) / len(self.won_turns) if self.won_turns else None

    @property
    def won_within(self) -> dict[int, float]:
        """Share of all episodes that were won within each of `TURNS` turns, up to the limit of the protocol."""
        limits = [limit for limit in TURNS if self.won_turns and limit <= self.protocol.max_turns]
        return {limit: sum(turns <= limit for turns in self.won_turns) / self.episodes for limit in limits}

    def notes(self) -> str:
        """Returns what a table has no column for, in a line: first of all how fast the won episodes were."""
        pace = f"{self.mean_won_turns:.1f} turns per won game" if self.mean_won_turns is not None else ""
        within = ", ".join(f"{limit}: {100 * share:.1f} %" for limit, share in self.won_within.items())
        macro = f"macro success {100 * self.macro_success_rate:.1f} %" if len(self._known_types) > 1 else ""
        waits = f"{100 * self.wait_rate:.1f} % of turns wait" if self.score_sum is not None else ""
        stops = ", ".join(f"{reason} {count}" for reason, count in self.stop_reasons.items())
        parts = [pace, within and f"won within {within}", macro, waits, f"ended by {stops}"]
        return "; ".join(filter(None, parts))

    def scalars(self) -> dict[str, float]:
        """Returns the metrics that a training run logs for an evaluation."""
        low, high = self.success_interval
        known = self._known_types
        types = {f"success_rate_{name}": count.success_rate for name, count in known.items() if len(known) > 1}
        return types | {  # a type may be named `low`
            "success_rate": self.success_rate,
            "success_rate_low": low,
            "success_rate_high": high,
            "macro_success_rate": self.macro_success_rate,
            "turns": self.mean_turns,
            "invalid_actions": self.invalid_action_rate,
            "aborted": self.stop_reasons.get(StopReason.ABORTED.value, 0) / self.episodes,
            "seconds": self.seconds,
            **({} if self.mean_score is None else {"score": self.mean_score, "wait_actions": self.wait_rate}),
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the counts, and for readers the numbers derived from them, for JSON."""
        types = {name: {**asdict(count), "success_rate": count.success_rate} for name, count in self.types.items()}
        return {**{name: getattr(self, name) for name in _DERIVED}, **asdict(self), "types": types}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> EvalReport:
        """Creates a report from the output of `to_dict`; derived numbers are recomputed."""
        return TypeAdapter(cls).validate_python(data)


def report_file(output_dir: str | os.PathLike[str], step: int) -> Path:
    """Returns the file for the reports of the evaluation after an optimizer step."""
    return Path(output_dir) / REPORTS / f"step_{step:06d}.json"


def report_files(output_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """Returns the existing files by optimizer step, in order. A copy under another name is left out."""
    files = (Path(output_dir) / REPORTS).glob("step_*.json")
    found = [(int(name[1]), path) for path in files if (name := re.fullmatch(r"step_(\d+)", path.stem))]
    return dict(sorted(found))


def format_table(reports: Sequence[EvalReport] | Mapping[str, Sequence[EvalReport]], *, width: int = 80) -> str:
    """Formats reports as a plain-text table: a row for each report and, if there are several, each of its task types.

    A mapping of reports has their labels, such as `"before RL"`. `width` is in characters.
    """
    labelled = reports if isinstance(reports, Mapping) else {"": reports}
    rows = [(label, report) for label, group in labelled.items() for report in group]
    heads = {"protocol": [r.protocol.name for _, r in rows], "suite": [r.suite for _, r in rows]}
    shared = [f"{name} {values[0]}" for name, values in heads.items() if len(set(values)) == 1]
    differ = [values for values in heads.values() if len(set(values)) > 1]
    names = [
        ", ".join(filter(None, [label, *(values[i] for values in differ), report.split]))
        for i, (label, report) in enumerate(rows)
    ]
    table = Table(title=plain(", ".join(shared)), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.pad_edge, table.collapse_padding = False, True
    table.add_column("games", overflow="fold")
    scored = any(report.mean_score is not None for _, report in rows)
    for heading in ("n", "success %", "95 % interval", *(["score"] if scored else []), "turns", "invalid %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, (_, report) in zip(names, rows, strict=True):
        _add_rows(table, name, report, scored)
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, force_terminal=False).print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    for name, (_, report) in zip(names, rows, strict=True):
        lines += textwrap.wrap(f"{plain(name)}: {report.notes()}", width, subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def _add_rows(table: Table, name: str, report: EvalReport, scored: bool) -> None:
    table.add_row(
        plain(name),
        str(report.episodes),
        f"{100 * report.success_rate:.1f}",
        _percent_interval(*report.success_interval),
        *(["" if report.mean_score is None else f"{report.mean_score:.1f}"] if scored else []),
        f"{report.mean_turns:.1f}",
        f"{100 * report.invalid_action_rate:.1f}",
    )
    for kind, count in report.types.items() if len(report.types) > 1 else ():
        table.add_row(
            plain(f" {kind or '(not begun)'}"),
            str(count.episodes),
            f"{100 * count.success_rate:.1f}",
            _percent_interval(*wilson_interval(count.wins, count.episodes)),
        )


def _percent_interval(low: float, high: float) -> str:
    return f"{100 * low:.1f} to {100 * high:.1f}"
