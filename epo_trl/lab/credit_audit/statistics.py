"""Compares credits with true advantages that are known with noise, with intervals over tasks, in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
DRAWS = 2000
_LEAST_TASKS = 4  # of an interval
_CLEAR = 2.0  # pooled standard errors from 0 beyond which the sign of an estimate counts


@dataclass(frozen=True, slots=True)
class Interval:
    """A statistic with its 95 % interval over tasks; NaN where it is undefined. An interval takes four tasks."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        half = (self.high - self.low) / 2
        return " ± ".join(f"{x:.2f}".replace("-0.", "-.").removeprefix("0") for x in (self.value, half))


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well one credit agrees with the true advantages."""

    correlation: Interval  # with the true advantages, corrected for the noise of their estimates
    gain: Interval  # of that correlation over GRPO's
    sign: Interval  # share of turns with the sign of a clear true advantage; no credit counts as half a turn
    silent: float  # share of turns without credit


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of an audit."""

    agreements: dict[str, Agreement]  # by credit
    turns: int
    tasks: int
    clear_turns: int  # those whose true advantage is not 0 and at least twice `standard_error` from it
    deviation: float  # of the true advantages, without the noise of their estimates
    standard_error: float  # of one estimate, pooled over all turns (root mean square)


def compare(
    credits: Mapping[str, Sequence[float]],
    halves: Sequence[tuple[float, float]],
    tasks: Sequence[str],
    *,
    seed: int = 0,
) -> Comparison:
    """Compares credits with true advantages.

    An estimate A of a true advantage is the mean of two independent halves. Their covariance estimates the variance of
    the true advantages without noise, so `cov(credit, A) / sqrt(var(credit) cov(half 1, half 2))` estimates the
    correlation with the true advantages (Spearman's correction for attenuation). Turns of a task are not independent,
    so a bootstrap draws whole tasks. It gives the standard error of an interval by Student's t: with few tasks the
    percentiles of the bootstrap itself would be too narrow.

    `credits` are the advantages of the turns by credit, with those of `grpo`; `halves` the two estimates of each turn's
    true advantage, `tasks` the task of each turn.
    """
    names, codes = np.unique(np.asarray(tasks), return_inverse=True)
    drawn = np.random.default_rng(seed).multinomial(len(names), np.full(len(names), 1 / len(names)), size=DRAWS)
    # Weights of the tasks, (1 + DRAWS, tasks): those of the first row are 1.
    weights = np.concatenate([np.ones((1, len(names))), drawn]).astype(np.float64)

    def sums(values: Floats) -> Floats:
        """Returns the sum of the values of all turns in each draw."""
        found: Floats = weights @ np.bincount(codes, values, minlength=len(names))
        return found

    def covariance(one: Floats, other: Floats) -> Floats:
        count = sums(np.ones_like(one))
        return sums(one * other) / count - sums(one) / count * (sums(other) / count)

    pairs = np.asarray(halves, dtype=np.float64)
    truth, error = pairs.mean(1), float(np.sqrt(np.mean((pairs[:, 0] - pairs[:, 1]) ** 2) / 4))
    spread = covariance(pairs[:, 0], pairs[:, 1])
    clear = (np.abs(truth) >= _CLEAR * error) & ~_is_silent(truth)  # without noise, 0 is 0 errors from 0

    def correlation(credit: Floats) -> Floats:
        own = covariance(credit, credit)
        scale = np.sqrt(np.where((own > 1e-12) & (spread > 0), own * spread, np.nan))
        found: Floats = covariance(credit, truth) / scale
        return found

    def share_of_signs(credit: Floats) -> Floats:
        same, total = np.where(_is_silent(credit), 0.5, (credit > 0) == (truth > 0)), sums(clear.astype(float))
        found: Floats = sums(same * clear) / np.where(total > 0, total, np.nan)
        return found

    given = {name: np.asarray(values, dtype=np.float64) for name, values in credits.items()}
    correlations = {name: correlation(values) for name, values in given.items()}
    agreements = {
        name: Agreement(
            correlation=_interval(correlations[name], len(names)),
            gain=_interval(correlations[name] - correlations["grpo"], len(names)),
            sign=_interval(share_of_signs(values), len(names)),
            silent=float(np.mean(_is_silent(values))),
        )
        for name, values in given.items()
    }
    deviation = float(np.sqrt(max(spread[0], 0.0)))
    return Comparison(agreements, len(truth), len(names), int(clear.sum()), deviation, error)


def ranked(comparison: Comparison) -> list[tuple[str, Agreement]]:
    """Returns the credits, the highest correlation first and undefined ones last."""
    return sorted(comparison.agreements.items(), key=lambda item: (isnan(v := item[1].correlation.value), -v))


def make_markdown(comparison: Comparison, title: str) -> str:
    """Returns the table in Markdown, with columns of equal width, and what the numbers rest on."""
    rows = [["credit", "correlation", "gain over grpo", "sign", "no credit"]]
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


def _is_silent(credit: Floats) -> NDArray[np.bool_]:
    return np.abs(credit) < 1e-9


def _interval(draws: Floats, tasks: int) -> Interval:
    """Returns value +- t * standard error, with tasks - 1 degrees of freedom.

    The deviation of the draws is multiplied by sqrt(tasks / (tasks - 1)), since they draw from the tasks themselves.
    """
    value, known = float(draws[0]), draws[1:][~np.isnan(draws[1:])]
    if tasks < _LEAST_TASKS or len(known) < 2:
        return Interval(value, np.nan, np.nan)
    error = float(np.std(known, ddof=1)) * (tasks / (tasks - 1)) ** 0.5
    half = float(stats.t.ppf(0.975, tasks - 1)) * error
    return Interval(value, value - half, value + half)
