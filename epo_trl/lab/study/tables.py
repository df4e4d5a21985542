"""The tables of a report, each computed from the outcomes of the runs (`outcomes.judge`). `""` without a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import fmean, median

import pandas as pd

from epo_trl.evaluation.wilson import wilson_interval
from epo_trl.lab.study.config import Study
from epo_trl.lab.study.markdown import NOTHING, number, percent, plain, points, spread, table
from epo_trl.lab.study.outcomes import THIRDS, TOKENS, by_arm, compare_starts, find_pairs, select_arm
from epo_trl.lab.study.statistics import Estimate, estimate, fisher_exact, pairs_needed


def training_table(study: Study, outcomes: pd.DataFrame) -> str:
    """Tabulates final training success and how runs reached it."""
    rows = []
    for name, runs in by_arm(outcomes):
        count, solved = runs.success.count(), runs.solved.sum()
        if not count:
            continue
        low, high = wilson_interval(solved, count)
        reached, invalid = runs.solved_at.dropna(), runs.invalid.dropna()
        ends = runs[["entropy_start", "entropy_end"]].dropna()
        rows.append(
            [
                plain(name), str(count), spread(estimate(runs.success)),
                f"{solved} ({100 * low:.0f} to {100 * high:.0f} %)", str(runs.trapped.sum()),
                f"{median(reached):.0f} ({len(reached)})" if len(reached) else NOTHING,
                f"{fmean(ends.entropy_start):.2f} → {fmean(ends.entropy_end):.2f}" if len(ends) else NOTHING,
                percent(fmean(invalid)) if len(invalid) else NOTHING,
                f"{runs.exploded_at.count()}, {runs.exploded.sum()}",
                f"{runs.collapsed_at.count()}, {runs.collapsed.sum()}",
            ]
        )  # fmt: skip
    head = ["arm", "seeds", "success %: mean ± sd (interval)", "solved", "trapped",
            f"RL steps to {percent(study.solved)} %: median (runs)", "entropy, nats", "invalid %",
            "exploded: ever, at the end", "collapsed: ever, at the end"]  # fmt: skip
    return table(head, rows)


def differences_table(study: Study, outcomes: pd.DataFrame) -> str:
    """Tabulates each arm's training success minus the baseline's, over the pairs."""
    base = select_arm(outcomes, study.baseline)
    rows = []
    for name, runs in by_arm(outcomes):
        differences = (find_pairs(runs, base).success - base.success).dropna()
        found = estimate(differences)
        if name == study.baseline or found is None:
            continue
        own, other = runs.solved[differences.index], base.solved[differences.index]
        counts = [(own & other).sum(), (own & ~other).sum(), (~own & other).sum(), (~own & ~other).sum()]
        p = fisher_exact(own.sum(), len(own), other.sum(), len(other))
        needed = pairs_needed(found.deviation, found.mean)
        rows.append([plain(name), str(found.count), points(found), number(needed, 0), " / ".join(map(str, counts)),
                     number(p, 3)])  # fmt: skip
    head = ["arm", "pairs", f"success − {plain(study.baseline)}, points (interval)", "pairs for power 0.8",
            "solved: both / this / baseline / neither", "Fisher's p"]  # fmt: skip
    return table(head, rows)


def seeds_table(study: Study, outcomes: pd.DataFrame) -> str:
    """Tabulates the training success of each run."""
    rows = [
        [plain(name), *(_one(runs.loc[seed]) if seed in runs.index else NOTHING for seed in study.seeds)]
        for name, runs in by_arm(outcomes)
        if runs.success.count()
    ]
    return table(["arm", *(f"seed {seed}" for seed in study.seeds)], rows)


def _one(run: pd.Series) -> str:
    if math.isnan(run.success):
        return NOTHING
    flags = {"**solved**": run.solved, "trapped": run.trapped, "exploded": run.exploded, "collapsed": run.collapsed}
    return " ".join([percent(run.success), *(mark for mark, is_set in flags.items() if is_set)])


def thirds_table(outcomes: pd.DataFrame) -> str:
    """Tabulates when the entropy of each third of the episode left the band."""
    rows = []
    for name, runs in by_arm(outcomes):
        left = runs.loc[runs.has_thirds.astype(bool), list(THIRDS)]
        if not len(left):
            continue
        medians = [f"{median(steps.dropna()):.0f} " if steps.count() else "" for _, steps in left.items()]
        cells = [f"{each}({left[third].count()} of {len(left)})" for third, each in zip(THIRDS, medians, strict=True)]
        complete = left.dropna()
        ordered = (complete["first"] <= complete["middle"]) & (complete["middle"] <= complete["last"])
        early = (ordered & (complete["first"] < complete["last"])).sum()
        rows.append([plain(name), *cells, f"{early} of {len(complete)}"])
    return table(
        ["arm", *(f"{third} third: median RL step (runs)" for third in THIRDS), "first before last, in order"], rows
    )


def tokens_table(outcomes: pd.DataFrame) -> str:
    """Tabulates the entropy where the reference policy had a choice and where it had none."""
    rows = []
    for name, runs in by_arm(outcomes):
        logged = runs[list(TOKENS)].dropna()
        if len(logged):
            cells = [" → ".join(number(median(each)) for each in zip(*logged[kind], strict=True)) for kind in TOKENS]
            rows.append([plain(name), str(len(logged)), *cells])
    head = ["arm", "runs", "choices, nats: start → highest → end", "forced, nats: start → highest → end"]
    return table(head, rows)


def paper_table(study: Study, outcomes: pd.DataFrame) -> str:
    """Tabulates success on the test lists like the paper's Table 1."""
    rates = _rates(study, outcomes)
    rows = _rows(_starts(outcomes), lambda found: f"{NOTHING} | {spread(found)}")
    return table(["arm", "seeds", *rates], rows + _rows(by_arm(rates), spread))


def _starts(outcomes: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Returns a name and the success before RL, by seed, of each group of arms that began alike."""
    groups: list[dict[str, pd.DataFrame]] = []
    for name, runs in by_arm(outcomes):
        alike = (group for group in groups if not any(compare_starts(runs, other).unlike for other in group.values()))
        if (group := next(alike, None)) is None:
            groups.append(group := {})
        group[name] = runs
    names = [f"before RL: {', '.join(group)}" if len(groups) > 1 else "before RL" for group in groups]
    starts = [{split: _before(pd.concat(group), split) for split in list_splits(outcomes)} for group in groups]
    first = [{split: each.dropna().groupby(level="seed").first() for split, each in one.items()} for one in starts]
    return list(zip(names, map(pd.DataFrame, first), strict=True))


def paper_differences(study: Study, outcomes: pd.DataFrame) -> str:
    """Tabulates each arm's success on the test lists minus the baseline's, over the pairs that played the same list."""
    rates = _rates(study, outcomes.assign(rates=_comparable_rates(study, outcomes)))
    rates = _add_mean(rates, [name for name in rates if name.endswith(" Succ.")])
    runs, base = dict(by_arm(outcomes)), select_arm(outcomes, study.baseline)
    differences = {
        name: values.loc[find_pairs(runs[name], base).index] - select_arm(rates, study.baseline)
        for name, values in by_arm(rates)
        if name != study.baseline
    }
    return table(["arm", "pairs", *rates], _rows(differences.items(), points))


def gains_table(study: Study, outcomes: pd.DataFrame) -> str:
    """Tabulates each arm's final success on the test lists minus that of the same run before RL, over its seeds."""
    gains = pd.DataFrame(
        {
            f"{plain(split.upper())} Succ.": _end(study, outcomes, split) - _before(outcomes, split)
            for split in list_splits(outcomes)
        },
        outcomes.index,
    )
    gains = _add_mean(gains, list(gains))
    return table(["arm", "seeds", *gains], _rows(by_arm(gains), points))


def _rows(arms: Iterable[tuple[str, pd.DataFrame]], show: Callable[[Estimate | None], str]) -> list[list[str]]:
    """Formats a row for each arm with a value: its name, the largest number of seeds, and one estimate per column."""
    counts = [(name, values, max(values.count(), default=0)) for name, values in arms]
    return [
        [plain(name), str(count), *(show(estimate(values[column])) for column in values)]
        for name, values, count in counts
        if count
    ]


def list_splits(outcomes: pd.DataFrame) -> list[str]:
    """Returns the names of the test lists."""
    return list(dict.fromkeys(split for rates in outcomes.rates for split in rates))


def _comparable_rates(study: Study, outcomes: pd.DataFrame) -> list[dict[str, list[float]]]:
    """Returns each run's rates on the lists that the baseline of its seed played by the same protocol, as long."""
    base = select_arm(outcomes, study.baseline).lists
    return [
        {
            split: rates
            for split, rates in run.rates.items()
            if split in other and run.lists[split].is_comparable(other[split])
        }
        for run in outcomes.itertuples()
        for other in [base.get(run.Index[1], {})]
    ]


def _rates(study: Study, outcomes: pd.DataFrame) -> pd.DataFrame:
    """Returns the paper's `Succ.*` and `Succ.` of each run on each test list, from 0 to 1."""
    columns = {}
    for split in list_splits(outcomes):
        best = outcomes.rates.map(lambda rates, split=split: max(rates.get(split, ()), default=math.nan))
        columns[f"{plain(split.upper())} Succ.\\*"] = best
        columns[f"{plain(split.upper())} Succ."] = _end(study, outcomes, split)
    return pd.DataFrame(columns, outcomes.index)


def _add_mean(values: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Adds the mean over the test lists for runs that have all of them; nothing if there is one list."""
    if len(columns) < 2:
        return values
    return values.assign(**{"mean of the lists, Succ.": values[columns].mean(axis=1, skipna=False)})


def _end(study: Study, outcomes: pd.DataFrame, split: str) -> pd.Series:
    """Returns the mean success of each run's last evaluations; NaN if there are too few."""
    last = outcomes.rates.map(lambda rates: rates.get(split, ())[-study.eval_window :])
    return last.map(lambda rates: fmean(rates) if len(rates) == study.eval_window else math.nan)


def _before(outcomes: pd.DataFrame, split: str) -> pd.Series:
    """Returns the success of each run before RL."""
    return outcomes.starts.map(lambda starts: starts[split].rate if split in starts else math.nan)
