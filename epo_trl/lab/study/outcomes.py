"""Evaluates each run of a study by the study's criteria."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pandas as pd

from epo_trl.evaluation.outcomes import START_STEPS, collapsed, exploded, left_band
from epo_trl.lab.study.config import Study
from epo_trl.lab.study.record import POINTS, SUCCESS, EvaluationRecord, Record, thin
from epo_trl.lab.study.statistics import ROUNDING, first_above

INVALID = "env/invalid_actions"
ENTROPY = "entropy/all_tokens"
THIRDS = ("first", "middle", "last")
TOKENS = {"choices": "ref-nucleus/choice_entropy", "forced": "ref-nucleus/forced_entropy"}


# NaN where a value was not logged or did not happen.
COLUMNS = {
    "success": "mean training success of the last RL steps; NaN if there are fewer than the window has",
    "solved": "whether `success` is above the study's level",
    "trapped": "whether `success` is below the study's level",
    "solved_at": "RL step at which the running mean first reached the level",
    "exploded_at": "RL step of the explosion",
    "exploded": "whether the explosion persists at the end of the run",
    "collapsed_at": "RL step of the collapse",
    "collapsed": "whether the collapse persists at the end of the run",
    "entropy_start": "mean entropy over all tokens in the first RL steps, in nats",
    "entropy_end": "the same in the last RL steps",
    "invalid": "share of invalid turns in the last RL steps",
    "choices": "entropy where the reference policy had a choice: start, maximum, end (thirtieths of the run)",
    "forced": "the same where it had none",
    "first": "RL step at which the entropy of the first third of the episode left the band",
    "middle": "the same of the middle third",
    "last": "the same of the last third",
    "has_thirds": "whether the thirds were logged",
    "starts": "evaluations before RL, {split: EvaluationRecord}",
    "rates": "success of the evaluations after RL began, {split: [rate, ...]}",
    "lists": "the last evaluation, {split: EvaluationRecord}",
    "begins_with": "checksum of the weights before RL, or name and revision of the model; empty if unknown",
}


def judge(study: Study, records: Sequence[Record]) -> pd.DataFrame:
    """Evaluates the runs. Returns one row per run, by arm and seed in the study's order, with `COLUMNS`."""
    by_run = {(record.arm, record.seed): record for record in records}
    keys = [(arm.name, seed) for arm in study.arms for seed in arm.seeds if (arm.name, seed) in by_run]
    finals: dict[str, list[float]] = {}
    for arm, seed in keys:
        if not math.isnan(final := final_success(by_run[arm, seed], study)):
            finals.setdefault(arm, []).append(final)
    best = max(map(fmean, finals.values()), default=-math.inf)
    rows = [_outcome(study, by_run[key], best) for key in keys]
    return pd.DataFrame(rows, pd.MultiIndex.from_tuples(keys, names=["arm", "seed"]), columns=list(COLUMNS))


def select_arm(outcomes: pd.DataFrame, arm: str) -> pd.DataFrame:
    """Returns the runs of an arm by seed; empty if it has none."""
    return outcomes[outcomes.index.get_level_values("arm") == arm].droplevel("arm")


def by_arm(outcomes: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields each arm that has runs, with its runs by seed."""
    for name, runs in outcomes.groupby(level="arm", sort=False):
        yield str(name), runs.droplevel("arm")


def final_success(record: Record, study: Study) -> float:
    """Computes the mean training success of the last RL steps; NaN if there are too few."""
    return _last(record.curve(SUCCESS), study.window)


@dataclass(frozen=True, slots=True)
class Starts:
    """How an arm's runs began compared with the baseline's, by seed. Seeds in no list began alike.

    Args:
        unlike: Seeds with different weights. If the weights are unknown, the evaluations before RL decide.
        played: Seeds with the same weights but different evaluations before RL.
        unknown: Seeds for which neither the weights nor a common evaluation before RL are known.
    """

    unlike: list[int]
    played: list[int]
    unknown: list[int]


def compare_starts(runs: pd.DataFrame, base: pd.DataFrame) -> Starts:
    """Compares the starts of the runs that share a seed with the baseline."""
    found = Starts([], [], [])
    for seed in [seed for seed in runs.index if seed in base.index]:
        one, other = runs.loc[seed], base.loc[seed]
        both = [split for split in one.starts if split in other.starts]
        differ = any(one.starts[split] != other.starts[split] for split in both)
        known = one.begins_with and other.begins_with
        if one.begins_with != other.begins_with if known else differ:
            found.unlike.append(seed)
        elif differ:
            found.played.append(seed)
        elif not known and not both:
            found.unknown.append(seed)
    return found


def find_other_lists(runs: pd.DataFrame, base: pd.DataFrame) -> list[int]:
    """Returns the seeds whose run played a test list by another protocol than the baseline's, or not as long."""
    shared = [seed for seed in runs.index if seed in base.index]
    return [
        seed
        for seed in shared
        if not all(one.is_comparable(base.lists[seed].get(split, one)) for split, one in runs.lists[seed].items())
    ]


def find_pairs(runs: pd.DataFrame, base: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs with a pair: a baseline run with the same seed that began with the same weights."""
    return runs[runs.index.isin(base.index) & ~runs.index.isin(compare_starts(runs, base).unlike)]


def _outcome(study: Study, record: Record, best: float) -> dict[str, Any]:
    success, invalid = record.curve(SUCCESS), record.curve(INVALID)
    entropy = record.curve(ENTROPY, "entropy")
    thirds = {third: record.curve(f"entropy/{third}_third") for third in THIRDS}
    final = _last(success, study.window)
    exploded_at, has_exploded = _failure(record, exploded, (ENTROPY, "entropy"), INVALID)
    collapsed_at, has_collapsed = _failure(record, collapsed, (TOKENS["choices"], ENTROPY), SUCCESS, best)
    evaluations: dict[str, list[EvaluationRecord]] = {}
    for one in record.evaluations:
        evaluations.setdefault(one.split, []).append(one)
    return {
        "success": final,
        "solved": final > study.solved + ROUNDING,
        "trapped": final < study.trapped - ROUNDING,
        "solved_at": first_above(success, study.solved, study.smooth),
        "exploded_at": exploded_at, "exploded": has_exploded,
        "collapsed_at": collapsed_at, "collapsed": has_collapsed,
        "entropy_start": fmean(entropy[:START_STEPS]) if len(entropy) else math.nan,
        "entropy_end": _last(entropy, study.window),
        "invalid": _last(invalid, study.window),
        **{kind: _extremes(record, name) for kind, name in TOKENS.items()},
        **{third: _left_at(values) for third, values in thirds.items()},
        "has_thirds": any(map(len, thirds.values())),
        "starts": {split: one for split, each in evaluations.items() for one in each if one.rl_step == 0},
        "rates": {split: [one.rate for one in each if one.rl_step > 0] for split, each in evaluations.items()},
        "lists": {split: each[-1] for split, each in evaluations.items()},
        "begins_with": record.begins_with,
    }  # fmt: skip


def _failure(record: Record, detect: Any, entropies: Sequence[str], other: str, *best: float) -> tuple[float, bool]:
    """Returns the RL step of a failure, NaN without one, and whether it persists at the end."""
    steps = record.curves.get("rl_step", ())
    known = [record.curves, record.thinned if record.thinned.get("rl_step") == steps else {}]
    entropy = next((curves[name] for curves in known for name in entropies if name in curves), ())
    curve = record.curves.get(other, ())
    if not entropy or not curve:
        return math.nan, False
    flags = detect(*(pd.Series(values, dtype=float).tolist() for values in (entropy, curve)), *best)
    return (steps[flags.index(True)], flags[-1]) if True in flags else (math.nan, False)


def _left_at(values: pd.Series) -> float:
    place = left_band(values.tolist())
    return math.nan if place is None else float(values.index[place])


def _extremes(record: Record, name: str) -> tuple[float, float, float] | None:
    if name in record.curves:
        curves = pd.DataFrame({name: record.curves[name]}, record.curves["rl_step"], dtype=float)
        values = thin(curves, POINTS)[name].dropna()
    else:
        values = record.curve(name)
    return (values.iloc[0], values.max(), values.iloc[-1]) if len(values) else None


def _last(values: pd.Series, count: int) -> float:
    return fmean(values.iloc[-count:]) if len(values) >= count else math.nan
