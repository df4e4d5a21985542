"""The report of a study in Markdown, generated only from the study's file and the records of its runs.

A table without a row is `""`. Names are escaped: they never act as markup.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, median

import pandas as pd

from epo_trl.evaluation import wilson_interval
from epo_trl.lab.study.config import Study, shown
from epo_trl.lab.study.outcomes import by_arm, find_pairs, find_unlike, judge, name_lists, select_arm
from epo_trl.lab.study.record import THIRDS, TOKENS, Record
from epo_trl.lab.study.statistics import Estimate, estimate, fisher_exact, pairs_needed
from epo_trl.runs.state_file import write_atomically

REPORT, PICTURE = "report.md", "curves.png"
NOTHING = "–"
GAINS = "Percentage points: the end minus the same run before RL; mean over seeds, 95 % interval."
LIST_DIFFERENCES = "Percentage points: mean over same-seed pairs, 95 % interval."
THIRDS_NOTE = (
    "RL step at which the entropy of a third of the episode's turns first left 0.3 to 1.5 times its start for ten RL "
    "steps in a row: median of the runs in which it did. In order: runs in which all three left, first third first."
)
TOKENS_NOTE = (
    "Mean entropy over the whole vocabulary at tokens where the reference policy gave more than the method's cut to "
    "two tokens or more (choices), and at all others (forced). Each value is the mean over a thirtieth of a run, then "
    "the median over runs, since a single explosion would dominate their mean."
)


def write_report(study: Study, records: Sequence[Record], folder: Path) -> list[Path]:
    """Writes the report and, if any run has curves, a figure. Returns the files.

    Args:
        study: Study to report.
        records: Records of the finished runs.
        folder: Folder to write to.
    """
    written = [folder / REPORT]
    if any(record.curves for record in records):
        from epo_trl.lab.study.figure import draw

        written.append(folder / PICTURE)
        draw(study, records, folder / PICTURE)
    write_atomically(folder / REPORT, report(study, records, picture=len(written) > 1))
    return written


def report(study: Study, records: Sequence[Record], *, picture: bool) -> str:
    """Generates the report in Markdown. It contains no times, so an interrupted study has the same report.

    Args:
        study: Study to report.
        records: Records of the finished runs.
        picture: Whether there is a figure beside the report.
    """
    outcomes, base = judge(study, records), plain(study.baseline)
    sections = {
        "Success on the test lists, %": (_evaluation_note(study, records), paper_table(study, outcomes)),
        "Gain of RL on the test lists": (GAINS, gains_table(study, outcomes)),
        f"Difference from {base} on the test lists": (LIST_DIFFERENCES, paper_differences(study, outcomes)),
        "Training": (_training_note(study), training_table(study, outcomes)),
        f"Difference from {base} in training": (
            _difference_note(study, outcomes),
            differences_table(study, outcomes),
        ),
        "Each run": ("Success in training at the end, %.", seeds_table(study, outcomes)),
        "Where entropy leaves first": (THIRDS_NOTE, thirds_table(outcomes)),
        "Which tokens": (TOKENS_NOTE, tokens_table(outcomes)),
        "Curves": ("", f"![curves]({PICTURE})\n" if picture else ""),
        "Settings": ("", _settings(study)),
        "Missing": ("These runs have not ended, or have failed:", _missing(study, records)),
        "Caveats": ("", _caveats(study, outcomes)),
    }
    parts = [f"# {plain(study.name)}", plain(study.question.strip())]
    parts += [f"Protocol: {plain(study.protocol.strip())}" if study.protocol else "", _origin(study, records)]
    for title, (note, content) in sections.items():
        parts += [f"## {title}", note, content.rstrip()] if content else []
    return "\n\n".join(filter(None, parts)) + "\n"


def _origin(study: Study, records: Sequence[Record]) -> str:
    versions = ", ".join(sorted({record.version for record in records})) or "none yet"
    command = f"epo-trl study {shown(study.path)}"
    return (
        f"Reproduce it: `{command} --results-dir FOLDER`; from the kept results alone: `{command} --report-only`. Made "
        f"with epo-trl {versions}."
    )


def _evaluation_note(study: Study, records: Sequence[Record]) -> str:
    name_of, lists = name_lists(records), [one for record in records for one in record.evaluations]
    played = sorted({f"{plain(name_of(one))}: {one.episodes} tasks, protocol `{one.protocol}`" for one in lists})
    last = "the last evaluation" if study.eval_window == 1 else f"the last {study.eval_window} evaluations"
    return (
        f"`Succ.*` is the best evaluation of a run, `Succ.` the mean of {last}; then mean ± standard deviation over "
        f"seeds (95 % interval of the mean, Student's t). {'; '.join(played)}."
    )


def _training_note(study: Study) -> str:
    solved, trapped = percent(study.solved), percent(study.trapped)
    return (
        f"Training episodes, mean of the last {study.window} RL steps of a run, then mean ± standard deviation over "
        f"seeds (95 % interval, Student's t). Solved: above {solved} % (95 % interval of the share, Wilson); trapped: "
        f"below {trapped} %. Steps: until the running mean over {study.smooth} RL steps reaches {solved} %, median of "
        "the runs that get there. Entropy: over all tokens, first RL steps → last ones. Exploded, collapsed: runs that "
        "ever were, and that are at their end, by the definitions in docs/metrics.md (`run/exploded`, "
        "`run/collapsed`), except that a collapse is judged against the best arm's success."
    )


def _compared(study: Study, outcomes: pd.DataFrame) -> int:
    """Returns the number of arms that have a pair with the baseline."""
    base = select_arm(outcomes, study.baseline)
    return sum(len(find_pairs(runs, base)) > 0 for name, runs in by_arm(outcomes) if name != study.baseline)


def _difference_note(study: Study, outcomes: pd.DataFrame) -> str:
    return (
        "Over same-seed pairs. Pairs for power 0.8: the number that a paired t test needs to detect a difference of "
        "this size with this deviation. Fisher's exact test, two-sided, on the numbers of solved runs, treated as "
        f"unpaired, without correction for multiple comparisons (comparisons: {_compared(study, outcomes)})."
    )


def _settings(study: Study) -> str:
    parts = [("(warm start)", study.warm_start, "of its run")] if study.warm_start else []
    parts += [(plain(arm.name), arm.part, " ".join(map(str, arm.seeds))) for arm in study.arms]
    rows = []
    for name, part, seeds in parts:
        changes = ", ".join(f"{field}: {json.dumps(value, default=str)}" for field, value in part.changes.items())
        changes = f"`{changes}`".replace("|", "\\|") if changes else "as in the file"
        rows.append([name, f"`{part.recipe.as_posix()}`", f"`{part.config.as_posix()}`", changes, seeds])
    return table(["arm", "recipe", "config", "changes", "seeds"], rows).replace("---:", "---")


def _missing(study: Study, records: Sequence[Record]) -> str:
    there = {(record.arm, record.seed) for record in records}
    return _listed((arm.name, [seed for seed in arm.seeds if (arm.name, seed) not in there]) for arm in study.arms)


def _listed(runs: Iterable[tuple[str, Sequence[int]]]) -> str:
    return "\n".join(f"- {plain(name)}: {_seeds(seeds)}" for name, seeds in runs if seeds)


def _seeds(seeds: Sequence[int]) -> str:
    return f"seeds {' '.join(map(str, seeds))}"


def _caveats(study: Study, outcomes: pd.DataFrame) -> str:
    base, arms, baseline = select_arm(outcomes, study.baseline), dict(by_arm(outcomes)), plain(study.baseline)
    counts = sorted({len(runs) for runs in arms.values()}) or [0]
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    lines = [
        f"{seeds} seeds per arm: an interval covers the seeds, for these games and this model only.",
        "Student's intervals assume roughly normal values. Where runs either solve the task or do not, look at the "
        "counts and at each run.",
        "The best of several arms looks better than it is, and so does the best of several evaluations (`Succ.*`).",
    ]
    if (count := _compared(study, outcomes)) > 1:
        lines.append(
            f"All differences use the same runs of {baseline}: if those were lucky, every arm on their seeds looks "
            f"worse. Each interval is for one comparison, not corrected for {count}."
        )
    for name, runs in arms.items():
        if unlike := find_unlike(runs, base):
            lines.append(
                f"{plain(name)} and {baseline} began differently ({_seeds(unlike)}): other models, other warm starts, "
                "as on another machine, or other rules of play. The differences leave these seeds out."
            )
    others = [plain(name) for name, runs in arms.items() if len(base) and set(runs.index) != set(base.index)]
    if others:
        lines.append(
            f"Not run on the same seeds as {baseline}: {'; '.join(others)}. Seeds differ in their warm start and "
            "games, so compare by the differences, which are over pairs, and not by the means of the arms."
        )
    if few := [plain(name) for name, runs in arms.items() if len(runs) <= 3]:
        lines.append(f"With three seeds or fewer, an arm is an anecdote: {'; '.join(few)}.")
    return "\n".join(f"- {line}" for line in lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table; the first column is text, the others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n" if rows else ""


def plain(text: str) -> str:
    """Escapes a text so that Markdown shows it unchanged."""
    return re.sub(r"([\\`*_{}\[\]<>()#|~$&])", r"\\\1", text)


def number(value: float, digits: int = 2) -> str:
    """Formats a number with `digits` decimals."""
    return f"{value:.{digits}f}" if math.isfinite(value) else NOTHING


def percent(share: float) -> str:
    """Formats a share, for example as `41.0`."""
    return number(100 * share, 1)


def spread(found: Estimate | None) -> str:
    """Formats mean, deviation and the interval, within 0 to 100, for example as `41.0 ± 3.2 (36.1 to 45.9)`."""
    if found is None or found.count == 1:
        return NOTHING if found is None else percent(found.mean)
    low, high = max(0.0, found.low), min(1.0, found.high)
    return f"{percent(found.mean)} ± {percent(found.deviation)} ({percent(low)} to {percent(high)})"


def points(found: Estimate | None) -> str:
    """Formats a difference in percentage points, for example as `+2.0 (-1.3 to +5.3)`."""
    if found is None or found.count == 1:
        return NOTHING if found is None else _signed(found.mean)
    return f"{_signed(found.mean)} ({_signed(found.low)} to {_signed(found.high)})"


def _signed(share: float) -> str:
    text = f"{100 * share:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def training_table(study: Study, outcomes: pd.DataFrame) -> str:
    """Tabulates final training success and how runs reached it."""
    rows = []
    for name, runs in by_arm(outcomes):
        count, solved = runs.success.count(), runs.solved.sum()
        if not count:
            continue
        low, high = wilson_interval(solved, count)
        reached, ends = runs.solved_at.dropna(), runs[["entropy_start", "entropy_end"]].dropna()
        rows.append(
            [
                plain(name), str(count), spread(estimate(runs.success)),
                f"{solved} ({100 * low:.0f} to {100 * high:.0f} %)", str(runs.trapped.sum()),
                f"{median(reached):.0f} ({len(reached)})" if len(reached) else NOTHING,
                " → ".join(map(number, ends.mean())) if len(ends) else NOTHING,
                percent(fmean([*runs.invalid.dropna()] or [math.nan])),
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
        needed = number(pairs_needed(found.deviation, found.mean), 0)
        rows.append([plain(name), str(found.count), points(found), needed, " / ".join(map(str, counts)), number(p, 3)])
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
        medians = [f"{steps.median():.0f} " if steps.count() else "" for _, steps in left.items()]
        cells = [f"{each}({left[third].count()} of {len(left)})" for third, each in zip(THIRDS, medians, strict=True)]
        complete = left.dropna()
        ordered = (complete["first"] <= complete["middle"]) & (complete["middle"] <= complete["last"])
        early = (ordered & (complete["first"] < complete["last"])).sum()
        rows.append([plain(name), *cells, f"{early} of {len(complete)}"])
    head = ["arm", *(f"{third} third: median RL step (runs)" for third in THIRDS), "first before last, in order"]
    return table(head, rows)


def tokens_table(outcomes: pd.DataFrame) -> str:
    """Tabulates the entropy where the reference policy had a choice and where it had none."""
    rows = []
    for name, runs in by_arm(outcomes):
        logged = runs[list(TOKENS)].dropna()
        if len(logged):
            cells = [" → ".join(number(median(each)) for each in zip(*logged[kind], strict=True)) for kind in TOKENS]
            rows.append([plain(name), str(len(logged)), *cells])
    return table(["arm", "runs", *(f"{kind}, nats: start → highest → end" for kind in TOKENS)], rows)


def paper_table(study: Study, outcomes: pd.DataFrame) -> str:
    """Tabulates success on the test lists like the paper's Table 1, and that before RL, by seed."""
    rates = _rates(study, outcomes)
    starts = pd.DataFrame({name: _before(outcomes, name) for name in list_names(outcomes)}, outcomes.index)
    rows = _rows([("before RL", starts.groupby(level="seed").first())], lambda found: f"{NOTHING} | {spread(found)}")
    return table(["arm", "seeds", *rates], rows + _rows(by_arm(rates), spread))


def paper_differences(study: Study, outcomes: pd.DataFrame) -> str:
    """Tabulates each arm's success on the test lists minus the baseline's, over the pairs."""
    rates = _rates(study, outcomes)
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
    gains = {
        f"{plain(name.upper())} Succ.": _end(study, outcomes, name) - _before(outcomes, name)
        for name in list_names(outcomes)
    }
    shown = _add_mean(pd.DataFrame(gains, outcomes.index), list(gains))
    return table(["arm", "seeds", *shown], _rows(by_arm(shown), points))


def _rows(arms: Iterable[tuple[str, pd.DataFrame]], show: Callable[[Estimate | None], str]) -> list[list[str]]:
    """Formats a row for each arm with a value: its name, the largest number of seeds, and one estimate per column."""
    counts = [(name, values, max(values.count(), default=0)) for name, values in arms]
    return [
        [plain(name), str(count), *(show(estimate(values[column])) for column in values)]
        for name, values, count in counts
        if count
    ]


def list_names(outcomes: pd.DataFrame) -> list[str]:
    """Returns the names of the test lists."""
    return list(dict.fromkeys(name for rates in outcomes.rates for name in rates))


def _rates(study: Study, outcomes: pd.DataFrame) -> pd.DataFrame:
    """Returns the paper's `Succ.*` and `Succ.` of each run on each test list, from 0 to 1."""
    columns = {}
    for name in list_names(outcomes):
        best = outcomes.rates.map(lambda rates, name=name: max(rates.get(name, ()), default=math.nan))
        columns[f"{plain(name.upper())} Succ.\\*"] = best
        columns[f"{plain(name.upper())} Succ."] = _end(study, outcomes, name)
    return pd.DataFrame(columns, outcomes.index)


def _add_mean(values: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Adds the mean over the test lists for runs that have all of them; nothing if there is one list."""
    if len(columns) < 2:
        return values
    return values.assign(**{"mean of the lists, Succ.": values[columns].mean(axis=1, skipna=False)})


def _end(study: Study, outcomes: pd.DataFrame, name: str) -> pd.Series:
    """Returns the mean success of each run's last evaluations; NaN if there are too few."""
    last = outcomes.rates.map(lambda rates: rates.get(name, ())[-study.eval_window :])
    return last.map(lambda rates: fmean(rates) if len(rates) == study.eval_window else math.nan)


def _before(outcomes: pd.DataFrame, name: str) -> pd.Series:
    """Returns the success of each run before RL."""
    return outcomes.starts.map(lambda starts: starts[name].rate if name in starts else math.nan)
