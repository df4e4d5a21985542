"""Evaluates each run of a study by the study's criteria."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from epo_trl.evaluation.outcomes import START_STEPS, collapsed, exploded
from epo_trl.lab.study.config import Study
from epo_trl.lab.study.record import ENTROPY, INVALID, SUCCESS, THIRDS, TOKENS, EvaluationRecord, Record, thin
from epo_trl.lab.study.statistics import ROUNDING, first_above


def judge(study: Study, records: Sequence[Record]) -> pd.DataFrame:
    """Evaluates the runs. Returns one row per run, by arm and seed in the study's order; see `_outcome`."""
    by_run = {(record.arm, record.seed): record for record in records}
    keys = [(arm.name, seed) for arm in study.arms for seed in arm.seeds if (arm.name, seed) in by_run]
    runs = pd.MultiIndex.from_tuples(keys, names=["arm", "seed"])
    finals = pd.Series([_last(by_run[key].curve(SUCCESS), study.window) for key in keys], runs, dtype=float)
    best, name_of = finals.groupby(level="arm").mean().max(), name_lists(records)
    rows = [_outcome(study, by_run[key], -math.inf if math.isnan(best) else best, name_of) for key in keys]
    columns = _outcome(study, Record("", 0, {}, "", 0.0), best, name_of)  # also if there is no run
    return pd.DataFrame(rows, runs, columns=[*columns])


def select_arm(outcomes: pd.DataFrame, arm: str) -> pd.DataFrame:
    """Returns the runs of an arm by seed; empty if it has none."""
    return outcomes[outcomes.index.get_level_values("arm") == arm].droplevel("arm")


def by_arm(outcomes: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields each arm that has runs, with its runs by seed."""
    for name, runs in outcomes.groupby(level="arm", sort=False):
        yield str(name), runs.droplevel("arm")


def name_lists(records: Sequence[Record]) -> Callable[[EvaluationRecord], str]:
    """Returns the function that names the test list of an evaluation: as its split.

    If a split was played by several protocols or with several numbers of tasks, each is a list of its own, so that they
    are never compared. Protocols of one name differ if the checksums of their settings are known and differ.
    """
    played: dict[str, set[tuple[str, int]]] = {}
    rules: dict[str, set[str]] = {}
    for one in (one for record in records for one in record.evaluations):
        played.setdefault(one.split, set()).add((one.protocol, one.episodes))
        rules.setdefault(one.split, set()).update(filter(None, [one.rules]))
    several = {split for split in played if len(played[split]) > 1 or len(rules[split]) > 1}
    return lambda one: (
        f"{one.split}, {one.protocol} {one.rules}, {one.episodes} tasks" if one.split in several else one.split
    )


def find_unlike(runs: pd.DataFrame, base: pd.DataFrame) -> list[int]:
    """Returns the seeds whose run began with other weights than the baseline's, if both are known."""
    seeds = runs.index.intersection(base.index, sort=False)
    begun = [(seed, {runs.begins_with[seed], base.begins_with[seed]}) for seed in seeds]
    return [seed for seed, weights in begun if len(weights) > 1 and all(weights)]


def find_pairs(runs: pd.DataFrame, base: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs with a pair: a baseline run with the same seed that began with the same weights."""
    return runs[runs.index.isin(base.index) & ~runs.index.isin(find_unlike(runs, base))]


def _outcome(study: Study, record: Record, best: float, name_of: Callable[[EvaluationRecord], str]) -> dict[str, Any]:
    """Returns the outcomes of a run; NaN where a value was not logged or did not happen."""
    success, entropy = record.curve(SUCCESS), record.curve(ENTROPY)
    final = _last(success, study.window)  # NaN if there are fewer RL steps than the window has
    exploded_at, has_exploded = _failure(record, exploded, ENTROPY, INVALID)
    certain = TOKENS["choices"] if TOKENS["choices"] in record.curves else ENTROPY
    collapsed_at, has_collapsed = _failure(record, collapsed, certain, SUCCESS, best)
    rates: dict[str, list[float]] = {name_of(one): [] for one in record.evaluations}  # after RL began
    for one in record.evaluations:
        rates[name_of(one)] += [one.rate] if one.rl_step > 0 else []
    return {
        "success": final,
        "solved": final > study.solved + ROUNDING,
        "trapped": final < study.trapped - ROUNDING,
        "solved_at": first_above(success, study.solved, study.smooth),
        "exploded_at": exploded_at,  # the first RL step
        "exploded": has_exploded,  # at the end of the run
        "collapsed_at": collapsed_at,
        "collapsed": has_collapsed,
        "entropy_start": entropy[:START_STEPS].mean(),  # over all tokens, in nats
        "entropy_end": _last(entropy, study.window),
        "invalid": _last(record.curve(INVALID), study.window),  # share of turns
        **{kind: _extremes(record, name) for kind, name in TOKENS.items()},
        **{third: math.nan if (step := record.left_band.get(third)) is None else step for third in THIRDS},
        "has_thirds": bool(record.left_band),
        # success on each test list: before RL, the best evaluation, the mean of the last ones
        "before": {name_of(one): one.rate for one in record.evaluations if one.rl_step == 0},
        "best": {name: max(each, default=math.nan) for name, each in rates.items()},
        "end": {name: _last(pd.Series(each, dtype=float), study.eval_window) for name, each in rates.items()},
        "begins_with": record.begins_with,
    }


def _failure(record: Record, detect: Any, entropy: str, other: str, *best: float) -> tuple[float, bool]:
    """Returns the RL step of a failure, NaN without one, and whether it persists at the end."""
    if entropy not in record.curves or other not in record.curves:
        return math.nan, False
    flags = detect(*(np.array(record.curves[name], dtype=float) for name in (entropy, other)), *best)
    return (flags.index(True) + 1, flags[-1]) if True in flags else (math.nan, False)


def _extremes(record: Record, name: str) -> tuple[float, float, float] | None:
    """Returns start, maximum and end of a metric, in means over a thirtieth of the run."""
    values = record.curve(name)
    if name in record.curves:
        values = thin(pd.DataFrame(record.curves[name], dtype=float))[0].dropna()
    return (values.iloc[0], values.max(), values.iloc[-1]) if len(values) else None


def _last(values: pd.Series, count: int) -> float:
    return fmean(values.iloc[-count:]) if len(values) >= count else math.nan
