"""Evaluates each run of a study by the study's criteria."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from epo_trl.evaluation.outcomes import START_STEPS, collapsed, exploded, left_band
from epo_trl.study.config import Study
from epo_trl.study.record import POINTS, EvaluationRecord, Record, thin
from epo_trl.study.statistics import first_above

SUCCESS = "env/success_rate"
INVALID = "env/invalid_actions"
THIRDS = ("first", "middle", "last")
TOKENS = {"choices": "ref-nucleus/choice_entropy", "forced": "ref-nucleus/forced_entropy"}


@dataclass(frozen=True, slots=True)
class Failure:
    """An explosion or a collapse.

    Args:
        at: First RL step of the failure.
        stays: Whether it persists at the end of the run; otherwise the run recovered.
    """

    at: int
    stays: bool


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The outcome of one run. A field is `None` if it was not logged or did not happen.

    Args:
        seed: Seed of the run.
        success: Mean training success of the last RL steps; `None` if there are fewer than the window has.
        solved: Whether `success` is above the study's level.
        trapped: Whether `success` is below the study's level.
        solved_at: RL step at which the running mean first reached the level.
        exploded: Entropy explosion of the run.
        collapsed: Entropy collapse of the run.
        entropy: Mean entropy over all tokens in the first RL steps and in the last, in nats.
        invalid: Share of invalid turns in the last RL steps.
        by_tokens: Entropy where the reference policy had a choice and where it had none, each at the start, at the
            maximum and at the end, in nats; means over a thirtieth of the run. Omits those that were not logged.
        left_band_at: RL step at which the entropy of each third of the episode left the band.
        has_thirds: Whether the thirds were logged.
        evaluations: Evaluations by split, in order, starting before RL.
        begins_with: Checksum of the warm start's weights, empty if unknown.
    """

    seed: int
    success: float | None
    solved: bool | None
    trapped: bool | None
    solved_at: int | None
    exploded: Failure | None
    collapsed: Failure | None
    entropy: tuple[float, float] | None
    invalid: float | None
    by_tokens: Mapping[str, tuple[float, float, float]]
    left_band_at: Mapping[str, int | None]
    has_thirds: bool
    evaluations: Mapping[str, Sequence[EvaluationRecord]]
    begins_with: str

    def best(self, split: str) -> float | None:
        """Returns the best success of all evaluations after RL began, the paper's `Succ.*`."""
        rates = self._rates(split)
        return max(rates) if rates else None

    def converged(self, split: str, window: int) -> float | None:
        """Returns the mean success of the last evaluations, the paper's `Succ.`; `None` if there are too few."""
        rates = self._rates(split)
        return fmean(rates[-window:]) if len(rates) >= window else None

    def before(self, split: str) -> float | None:
        """Returns the success before RL."""
        start = self.start(split)
        return None if start is None else start.rate

    def start(self, split: str) -> EvaluationRecord | None:
        """Returns the evaluation before RL. With the same weights, recipe and rules it is the same in every turn."""
        return next((one for one in self.evaluations.get(split, ()) if one.rl_step == 0), None)

    def has_other_weights(self, other: RunOutcome) -> bool:
        """Returns whether the two runs are known to have begun with different weights."""
        return bool(self.begins_with and other.begins_with) and self.begins_with != other.begins_with

    def _rates(self, split: str) -> list[float]:
        return [one.rate for one in self.evaluations.get(split, ()) if one.rl_step > 0]


Outcomes = dict[str, dict[int, RunOutcome]]  # by arm and seed


def judge(study: Study, records: Sequence[Record]) -> Outcomes:
    """Evaluates the runs by arm and seed, in the study's order; an arm without a record has no seeds."""
    found = {(record.arm, record.seed): record for record in records}
    arms = {arm.name: [found[arm.name, seed] for seed in arm.seeds if (arm.name, seed) in found] for arm in study.arms}
    finals = [
        fmean(values)
        for each in arms.values()
        if (values := [value for record in each if (value := final_success(record, study)) is not None])
    ]
    best = max(finals, default=-math.inf)
    return {name: {record.seed: _outcome(study, record, best) for record in each} for name, each in arms.items()}


def final_success(record: Record, study: Study) -> float | None:
    """Computes the mean training success of the last RL steps."""
    return _last(record.curves.get(SUCCESS, ()), study.window)


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


def compare_starts(runs: Mapping[int, RunOutcome], base: Mapping[int, RunOutcome]) -> Starts:
    """Compares the starts of the runs that share a seed with the baseline."""
    found = Starts([], [], [])
    for seed in [seed for seed in runs if seed in base]:
        one, other = runs[seed], base[seed]
        starts = [(one.start(split), other.start(split)) for split in one.evaluations]
        both = [(mine, theirs) for mine, theirs in starts if mine and theirs]
        differ, known = any(mine != theirs for mine, theirs in both), one.begins_with and other.begins_with
        if one.has_other_weights(other) or (differ and not known):
            found.unlike.append(seed)
        elif differ:
            found.played.append(seed)
        elif not known and not both:
            found.unknown.append(seed)
    return found


def find_pairs(runs: Mapping[int, RunOutcome], base: Mapping[int, RunOutcome]) -> dict[int, RunOutcome]:
    """Returns the runs with a pair: a baseline run with the same seed that began with the same weights."""
    unlike = compare_starts(runs, base).unlike
    return {seed: run for seed, run in runs.items() if seed in base and seed not in unlike}


def _outcome(study: Study, record: Record, best: float) -> RunOutcome:
    steps = [int(step) for step in record.curves.get("rl_step", ()) if step is not None]
    success = final_success(record, study)
    entropy = record.curves.get("entropy/all_tokens") or record.thinned.get("entropy") or ()
    choices = record.curves.get(TOKENS["choices"]) or record.curves.get("entropy/all_tokens") or ()
    thirds = {third: record.curves.get(f"entropy/{third}_third", ()) for third in THIRDS}
    ends = _first(entropy), _last(entropy, study.window)
    splits = dict.fromkeys(one.split for one in record.evaluations)

    def at(index: int | None) -> int | None:
        return None if index is None else steps[index]

    def failure(kind: str) -> Failure | None:
        series = (entropy, record.curves.get(INVALID)) if kind == "exploded" else (choices, record.curves.get(SUCCESS))
        if not all(series) or len(series[0]) != len(steps):
            return None
        one, other = ([math.nan if value is None else value for value in values or ()] for values in series)
        flags = exploded(one, other) if kind == "exploded" else collapsed(one, other, best)
        return Failure(steps[flags.index(True)], flags[-1]) if True in flags else None

    return RunOutcome(
        seed=record.seed,
        success=success,
        solved=None if success is None else success > study.solved,
        trapped=None if success is None else success < study.trapped,
        solved_at=at(first_above(record.curves.get(SUCCESS, ()), study.solved, study.smooth)),
        exploded=failure("exploded"),
        collapsed=failure("collapsed"),
        entropy=None if ends[0] is None or ends[1] is None else (ends[0], ends[1]),
        invalid=_last(record.curves.get(INVALID, ()), study.window),
        by_tokens={kind: shape for kind, name in TOKENS.items() if (shape := _shape(record, name)) is not None},
        left_band_at={
            third: at(left_band([math.nan if value is None else value for value in values]))
            for third, values in thirds.items()
        },
        has_thirds=any(thirds.values()),
        evaluations={split: [one for one in record.evaluations if one.split == split] for split in splits},
        begins_with=record.begins_with,
    )


def _shape(record: Record, name: str) -> tuple[float, float, float] | None:
    if name in record.curves:
        values = thin({each: record.curves[each] for each in ("rl_step", name)}, POINTS)[name]
    else:
        values = list(record.thinned.get(name, ()))
    there = [value for value in values if value is not None]
    return (there[0], max(there), there[-1]) if there else None


def _first(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return fmean(there[:START_STEPS]) if there else None


def _last(values: Sequence[float | None], count: int) -> float | None:
    there = [value for value in values if value is not None]
    return fmean(there[-count:]) if len(there) >= count else None
