"""The tables of a report, each computed from the outcomes of the runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

from epo_trl.evaluation.wilson import wilson_interval
from epo_trl.study.config import Study
from epo_trl.study.markdown import NOTHING, number, percent, plain, points, spread, table
from epo_trl.study.outcomes import THIRDS, TOKENS, Failure, Outcomes, RunOutcome, find_pairs
from epo_trl.study.statistics import estimate, fisher_exact, paired, pairs_needed

Value = Callable[[RunOutcome], float | None]


def by_seed(outcomes: Mapping[int, RunOutcome], value: Value) -> dict[int, float]:
    """Returns the values that are not `None`, by seed."""
    found = {seed: value(outcome) for seed, outcome in outcomes.items()}
    return {seed: one for seed, one in found.items() if one is not None}


def training_table(study: Study, outcomes: Outcomes) -> str:
    """Tabulates final training success and how runs reached it; `""` if no run has logged it."""
    rows = []
    for name, runs in outcomes.items():
        final = by_seed(runs, lambda run: run.success)
        if not final:
            continue
        reached = [run.solved_at for run in runs.values() if run.solved_at is not None]
        ends = [run.entropy for run in runs.values() if run.entropy is not None]
        invalid = list(by_seed(runs, lambda run: run.invalid).values())
        rows.append(
            [
                plain(name), str(len(final)), spread(estimate(list(final.values()))), _solved(runs),
                str(sum(bool(run.trapped) for run in runs.values())),
                f"{median(reached):.0f} ({len(reached)})" if reached else NOTHING,
                f"{fmean(one for one, _ in ends):.2f} → {fmean(two for _, two in ends):.2f}" if ends else NOTHING,
                percent(fmean(invalid)) if invalid else NOTHING,
                _failures([run.exploded for run in runs.values()]), _failures([run.collapsed for run in runs.values()]),
            ]
        )  # fmt: skip
    head = ["arm", "seeds", "success %: mean ± sd (interval)", "solved", "trapped",
            f"RL steps to {percent(study.solved)} %: median (runs)", "entropy, nats", "invalid %",
            "exploded: ever, at the end", "collapsed: ever, at the end"]  # fmt: skip
    return table(head, rows) if rows else ""


def _solved(runs: Mapping[int, RunOutcome]) -> str:
    """Formats the number of solved runs with Wilson's interval of the share, for example as `4 (25 to 84 %)`."""
    judged = [run.solved for run in runs.values() if run.solved is not None]
    low, high = wilson_interval(sum(judged), len(judged))
    return f"{sum(judged)} ({100 * low:.0f} to {100 * high:.0f} %)"


def _failures(found: Sequence[Failure | None]) -> str:
    """Formats how many runs ever failed and how many still do at the end, for example as `9, 2`."""
    had = [one for one in found if one is not None]
    return f"{len(had)}, {sum(one.stays for one in had)}"


def differences_table(study: Study, outcomes: Outcomes) -> str:
    """Tabulates each arm's training success minus the baseline's, over the pairs."""
    base = by_seed(outcomes[study.baseline], lambda run: run.success)
    rows = []
    for name, runs in outcomes.items():
        own = by_seed(find_pairs(runs, outcomes[study.baseline]), lambda run: run.success)
        found = paired(own, base)
        if name == study.baseline or found is None:
            continue
        shared = [seed for seed in own if seed in base]
        pairs = [(bool(runs[seed].solved), bool(outcomes[study.baseline][seed].solved)) for seed in shared]
        both, only, other = (pairs.count(pair) for pair in ((True, True), (True, False), (False, True)))
        p = fisher_exact(both + only, len(pairs), both + other, len(pairs))
        rows.append(
            [
                plain(name), str(found.count), points(found), _needed(found.deviation, found.mean),
                f"{both} / {only} / {other} / {len(pairs) - both - only - other}", number(p, 3),
            ]
        )  # fmt: skip
    head = ["arm", "pairs", f"success − {plain(study.baseline)}, points (interval)", "pairs for power 0.8",
            "solved: both / this / baseline / neither", "Fisher's p"]  # fmt: skip
    return table(head, rows) if rows else ""


def _needed(deviation: float, mean: float) -> str:
    count = pairs_needed(deviation, mean)
    return NOTHING if math.isinf(count) else f"{count:.0f}"


def seeds_table(study: Study, outcomes: Outcomes) -> str:
    """Tabulates the training success of each run."""
    rows = []
    for name, runs in outcomes.items():
        if by_seed(runs, lambda run: run.success):
            rows.append([plain(name), *(_one(runs.get(seed)) for seed in study.seeds)])
    return table(["arm", *(f"seed {seed}" for seed in study.seeds)], rows) if rows else ""


def _one(run: RunOutcome | None) -> str:
    if run is None or run.success is None:
        return NOTHING
    flags = (("**solved**", run.solved), ("trapped", run.trapped),
             ("exploded", run.exploded and run.exploded.stays),
             ("collapsed", run.collapsed and run.collapsed.stays))  # fmt: skip
    marks = [mark for mark, held in flags if held]
    return " ".join([percent(run.success), *marks])


def thirds_table(outcomes: Outcomes) -> str:
    """Tabulates when the entropy of each third of the episode left the band; `""` if it was not logged."""
    rows = []
    for name, runs in outcomes.items():
        logged = [run for run in runs.values() if run.has_thirds]
        if not logged:
            continue
        cells = []
        for third in THIRDS:
            left = [step for run in logged if (step := run.left_band_at.get(third)) is not None]
            cells.append(f"{median(left):.0f} ({len(left)} of {len(logged)})" if left else f"(0 of {len(logged)})")
        known = [[step for step in run.left_band_at.values() if step is not None] for run in logged]
        whole = [steps for steps in known if len(steps) == len(THIRDS)]
        early = sum(steps == sorted(steps) and steps[0] < steps[-1] for steps in whole)
        rows.append([plain(name), *cells, f"{early} of {len(whole)}"])
    head = ["arm", *(f"{third} third: median RL step (runs)" for third in THIRDS), "first before last, in order"]
    return table(head, rows) if rows else ""


def tokens_table(outcomes: Outcomes) -> str:
    """Tabulates the entropy where the reference policy had a choice and where it had none; `""` if not logged."""
    rows = []
    for name, runs in outcomes.items():
        logged = [run.by_tokens for run in runs.values() if len(run.by_tokens) == len(TOKENS)]
        if logged:
            cells = [" → ".join(number(median(run[kind][i] for run in logged)) for i in range(3)) for kind in TOKENS]
            rows.append([plain(name), str(len(logged)), *cells])
    head = ["arm", "runs", "choices, nats: start → highest → end", "forced, nats: start → highest → end"]
    return table(head, rows) if rows else ""


def list_splits(outcomes: Outcomes) -> list[str]:
    """Returns the names of the test lists."""
    return list(
        dict.fromkeys(split for runs in outcomes.values() for run in runs.values() for split in run.evaluations)
    )


def paper_table(study: Study, outcomes: Outcomes) -> str:
    """Tabulates success on the test lists like the paper's Table 1; `""` without evaluations."""
    splits = list_splits(outcomes)
    measures = [measure for split in splits for measure in _measures(study, split)]
    rows = []
    before = {split: _before(outcomes, split) for split in splits}
    if any(before.values()):
        cells = [cell for split in splits for cell in (NOTHING, _spread(list(before[split].values())))]
        rows.append(["before RL", str(max(map(len, before.values()))), *cells])
    for name, runs in outcomes.items():
        values = [list(by_seed(runs, value).values()) for _, value in measures]
        if any(values):
            rows.append([plain(name), str(max(map(len, values))), *map(_spread, values)])
    return table(["arm", "seeds", *(title for title, _ in measures)], rows) if splits and rows else ""


def _before(outcomes: Outcomes, split: str) -> dict[int, float]:
    """Returns the success before RL by seed, of the first arm that was evaluated then."""
    found: dict[int, float] = {}
    for runs in outcomes.values():
        found = by_seed(runs, lambda run: run.before(split)) | found
    return found


def paper_differences(study: Study, outcomes: Outcomes) -> str:
    """Tabulates each arm's success on the test lists minus the baseline's, over the pairs."""
    splits = list_splits(outcomes)
    measures = [measure for split in splits for measure in _measures(study, split)]
    measures += _mean_of_lists([_end(study, split) for split in splits])
    base, rows = outcomes[study.baseline], []
    for name, runs in outcomes.items():
        own = find_pairs(runs, base)
        found = [paired(by_seed(own, value), by_seed(base, value)) for _, value in measures]
        there = [one for one in found if one is not None]
        if name != study.baseline and there:
            rows.append([plain(name), str(max(one.count for one in there)), *map(points, found)])
    return table(["arm", "pairs", *(title for title, _ in measures)], rows) if rows else ""


def gains_table(study: Study, outcomes: Outcomes) -> str:
    """Tabulates each arm's final success on the test lists minus that before RL, over its seeds.

    Success before RL comes from the run itself. If it was not evaluated, it comes from the same seed of the first arm
    that was and that is not known to have begun with different weights.
    """
    splits = list_splits(outcomes)
    gains = [_gain(study, outcomes, split) for split in splits]
    measures = [(f"{plain(split.upper())} Succ.", gain) for split, gain in zip(splits, gains, strict=True)]
    measures += _mean_of_lists(gains)
    rows = []
    for name, runs in outcomes.items():
        values = [list(by_seed(runs, value).values()) for _, value in measures]
        if any(values):
            found = [estimate(one) if one else None for one in values]
            rows.append([plain(name), str(max(map(len, values))), *map(points, found)])
    return table(["arm", "seeds", *(title for title, _ in measures)], rows) if rows else ""


def _gain(study: Study, outcomes: Outcomes, split: str) -> Value:
    def gain(run: RunOutcome) -> float | None:
        same_seed = [runs[run.seed] for runs in outcomes.values() if run.seed in runs]
        alike = [run, *(one for one in same_seed if not run.has_other_weights(one))]
        start = next((rate for one in alike if (rate := one.before(split)) is not None), None)
        end = run.converged(split, study.eval_window)
        return None if end is None or start is None else end - start

    return gain


def _mean_of_lists(values: Sequence[Value]) -> list[tuple[str, Value]]:
    """Returns the mean over the test lists for runs that have all of them; nothing if there is one list."""

    def mean(run: RunOutcome) -> float | None:
        found = [one for value in values if (one := value(run)) is not None]
        return fmean(found) if len(found) == len(values) else None

    return [("mean of the lists, Succ.", mean)] if len(values) > 1 else []


def _measures(study: Study, split: str) -> list[tuple[str, Value]]:
    title = plain(split.upper())
    return [
        (f"{title} Succ.\\*", lambda run: run.best(split)),
        (f"{title} Succ.", _end(study, split)),
    ]


def _end(study: Study, split: str) -> Value:
    return lambda run: run.converged(split, study.eval_window)


def _spread(values: Sequence[float]) -> str:
    return spread(estimate(values)) if values else NOTHING
