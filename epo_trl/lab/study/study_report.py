"""The report of a study in Markdown, generated only from the study's file and the records of its runs.

A table without a row is `""`. Names are escaped: they never act as markup.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import pandas as pd
from scipy import stats

from epo_trl.evaluation import wilson_interval
from epo_trl.lab.study.config import Study, shown
from epo_trl.lab.study.outcomes import by_arm, find_pairs, find_unlike, judge, name_lists, select_arm
from epo_trl.lab.study.record import THIRDS, TOKENS, Record
from epo_trl.lab.study.statistics import Estimate, estimate, pairs_needed
from epo_trl.runs.files import write_atomically

REPORT, PICTURE = "report.md", "curves.png"
NOTHING = "–"
GAINS_NOTE = "Percentage points: the end minus the same run before RL; mean over seeds, 95 % interval."
LISTS_NOTE = "Percentage points: mean over same-seed pairs, 95 % interval."
PAIRS_NOTE = (
    "Over same-seed pairs. Pairs for power 0.8: the number that a paired t test needs to detect a difference of this "
    "size with this deviation. Fisher's exact test, two-sided, on the numbers of solved runs, treated as unpaired, "
    "without correction for multiple comparisons (comparisons: {})."
)
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
    """Writes the report and, if any run has curves, a figure. Returns the files."""
    written = [folder / REPORT]
    if any(record.curves for record in records):
        from epo_trl.lab.study.figure import draw

        written.append(folder / PICTURE)
        draw(study, records, folder / PICTURE)
    write_atomically(folder / REPORT, report(study, records, picture=len(written) > 1))
    return written


def report(study: Study, records: Sequence[Record], *, picture: bool) -> str:
    """Generates the report, with a link to the picture. Without times, so that of an interrupted study is the same."""
    outcomes, base = judge(study, records), plain(study.baseline)
    versions = ", ".join(sorted({record.version for record in records})) or "none yet"
    command = f"epo-trl study {shown(study.path)}"
    parts = [
        f"# {plain(study.name)}",
        plain(study.question.strip()),
        f"Protocol: {plain(study.protocol.strip())}" if study.protocol else "",
        f"Reproduce it: `{command} --results-dir FOLDER`; from the kept results alone: `{command} --report-only`. Made "
        f"with epo-trl {versions}.",
    ]
    for title, note, content in (
        ("Success on the test lists, %", _lists_note(study, records), paper_table(outcomes)),
        ("Gain of RL on the test lists", GAINS_NOTE, gains_table(outcomes)),
        (f"Difference from {base} on the test lists", LISTS_NOTE, paper_differences(study, outcomes)),
        ("Training", _training_note(study), training_table(study, outcomes)),
        (
            f"Difference from {base} in training",
            PAIRS_NOTE.format(_compared(study, outcomes)),
            differences_table(study, outcomes),
        ),
        ("Each run", "Success in training at the end, %.", seeds_table(study, outcomes)),
        ("Where entropy leaves first", THIRDS_NOTE, thirds_table(outcomes)),
        ("Which tokens", TOKENS_NOTE, tokens_table(outcomes)),
        ("Curves", "", f"![curves]({PICTURE})" if picture else ""),
        ("Settings", "", _settings(study)),
        ("Missing", "These runs have not ended, or have failed:", _missing(study, outcomes)),
        ("Caveats", "", _caveats(study, outcomes)),
    ):
        parts += [f"## {title}", note, content.rstrip()] if content else []
    return "\n\n".join(filter(None, parts)) + "\n"


def _lists_note(study: Study, records: Sequence[Record]) -> str:
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


def _settings(study: Study) -> str:
    rows = []
    for arm in [*filter(None, [study.warm_start]), *study.arms]:
        changes = ", ".join(f"{field}: {json.dumps(value, default=str)}" for field, value in arm.changes.items())
        is_start = arm is study.warm_start
        rows.append(
            {
                "arm": "(warm start)" if is_start else plain(arm.name),
                "recipe": f"`{arm.recipe.as_posix()}`",
                "config": f"`{arm.config.as_posix()}`",
                "changes": f"`{changes}`".replace("|", "\\|") if changes else "as in the file",
                "seeds": "of its run" if is_start else " ".join(map(str, arm.seeds)),
            }
        )
    return table(rows).replace("---:", "---")


def _missing(study: Study, outcomes: pd.DataFrame) -> str:
    missing = {arm.name: [seed for seed in arm.seeds if (arm.name, seed) not in outcomes.index] for arm in study.arms}
    return "\n".join(f"- {plain(name)}: {_seeds(seeds)}" for name, seeds in missing.items() if seeds)


def _seeds(seeds: Sequence[int]) -> str:
    return f"seeds {' '.join(map(str, seeds))}"


def _caveats(study: Study, outcomes: pd.DataFrame) -> str:
    base, arms, baseline = select_arm(outcomes, study.baseline), dict(by_arm(outcomes)), plain(study.baseline)
    counts = sorted({len(runs) for runs in arms.values()}) or [0]
    lines = [
        f"{' to '.join(map(str, dict.fromkeys([counts[0], counts[-1]])))} seeds per arm: an interval covers the seeds, "
        "for these games and this model only.",
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
                f"{plain(name)} and {baseline} began differently ({_seeds(unlike)}): other models, or other warm "
                "starts, as on another machine. The differences leave these seeds out."
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
            {
                "arm": plain(name),
                "seeds": str(count),
                "success %: mean ± sd (interval)": spread(estimate(runs.success)),
                "solved": f"{solved} ({100 * low:.0f} to {100 * high:.0f} %)",
                "trapped": str(runs.trapped.sum()),
                f"RL steps to {percent(study.solved)} %: median (runs)": (
                    f"{median(reached):.0f} ({len(reached)})" if len(reached) else NOTHING
                ),
                "entropy, nats": " → ".join(map(number, ends.mean())) if len(ends) else NOTHING,
                "invalid %": percent(fmean([*runs.invalid.dropna()] or [math.nan])),
                "exploded: ever, at the end": f"{runs.exploded_at.count()}, {runs.exploded.sum()}",
                "collapsed: ever, at the end": f"{runs.collapsed_at.count()}, {runs.collapsed.sum()}",
            }
        )
    return table(rows)


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
        test = stats.fisher_exact([[own.sum(), (~own).sum()], [other.sum(), (~other).sum()]])
        rows.append(
            {
                "arm": plain(name),
                "pairs": str(found.count),
                f"success − {plain(study.baseline)}, points (interval)": points(found),
                "pairs for power 0.8": number(pairs_needed(found.deviation, found.mean), 0),
                "solved: both / this / baseline / neither": " / ".join(map(str, counts)),
                "Fisher's p": number(test.pvalue, 3),
            }
        )
    return table(rows)


def seeds_table(study: Study, outcomes: pd.DataFrame) -> str:
    """Tabulates the training success of each run."""

    def cell(run: pd.Series) -> str:
        flags = {"**solved**": run.solved, "trapped": run.trapped, "exploded": run.exploded, "collapsed": run.collapsed}
        marks = [mark for mark, is_set in flags.items() if is_set]
        return NOTHING if math.isnan(run.success) else " ".join([percent(run.success), *marks])

    return table(
        [
            {"arm": plain(name)}
            | {f"seed {seed}": cell(runs.loc[seed]) if seed in runs.index else NOTHING for seed in study.seeds}
            for name, runs in by_arm(outcomes)
            if runs.success.count()
        ]
    )


def thirds_table(outcomes: pd.DataFrame) -> str:
    """Tabulates when the entropy of each third of the episode left the band."""
    rows = []
    for name, runs in by_arm(outcomes):
        left = runs.loc[runs.has_thirds.astype(bool), list(THIRDS)]
        complete = left.dropna()
        ordered = (complete["first"] <= complete["middle"]) & (complete["middle"] <= complete["last"])
        early = (ordered & (complete["first"] < complete["last"])).sum()
        cells = {}
        for third, steps in left.items():
            at = f"{steps.median():.0f} " if steps.count() else ""
            cells[f"{third} third: median RL step (runs)"] = f"{at}({steps.count()} of {len(left)})"
        if len(left):
            rows.append({"arm": plain(name), **cells, "first before last, in order": f"{early} of {len(complete)}"})
    return table(rows)


def tokens_table(outcomes: pd.DataFrame) -> str:
    """Tabulates the entropy where the reference policy had a choice and where it had none."""
    rows = []
    for name, runs in by_arm(outcomes):
        logged = runs[list(TOKENS)].dropna()
        cells = {
            f"{kind}, nats: start → highest → end": " → ".join(
                number(median(each)) for each in zip(*logged[kind], strict=True)
            )
            for kind in TOKENS
        }
        if len(logged):
            rows.append({"arm": plain(name), "runs": str(len(logged)), **cells})
    return table(rows)


def paper_table(outcomes: pd.DataFrame) -> str:
    """Tabulates success on the test lists like the paper's Table 1, and that before RL, by seed."""
    rates = _rates(outcomes)
    starts = _by_list(outcomes, "before").groupby(level="seed").first().reindex(columns=rates.columns)
    return table(_rows([("before RL", starts)], "seeds", spread) + _rows(by_arm(rates), "seeds", spread))


def paper_differences(study: Study, outcomes: pd.DataFrame) -> str:
    """Tabulates each arm's success on the test lists minus the baseline's, over the pairs."""
    rates, base = _add_mean(_rates(outcomes)), select_arm(outcomes, study.baseline)
    differences = [
        (name, rates.loc[name].loc[find_pairs(runs, base).index] - rates.loc[study.baseline])
        for name, runs in by_arm(outcomes)
        if name != study.baseline and len(base)
    ]
    return table(_rows(differences, "pairs", points))


def gains_table(outcomes: pd.DataFrame) -> str:
    """Tabulates each arm's final success on the test lists minus that of the same run before RL, over its seeds."""
    end = _by_list(outcomes, "end")
    return table(_rows(by_arm(_add_mean((end - _by_list(outcomes, "before"))[end.columns])), "seeds", points))


def _rates(outcomes: pd.DataFrame) -> pd.DataFrame:
    """Returns the paper's `Succ.*` and `Succ.` of each run on each test list, from 0 to 1."""
    best, end = _by_list(outcomes, "best"), _by_list(outcomes, "end")
    columns = {}
    for name in end:
        columns[f"{name}\\*"], columns[name] = best[name], end[name]
    return pd.DataFrame(columns, outcomes.index)


def _by_list(outcomes: pd.DataFrame, name: str) -> pd.DataFrame:
    """Returns an outcome with a column per test list, of each run."""
    found = pd.DataFrame([*outcomes[name]], outcomes.index, dtype=float)
    return found.rename(columns=lambda split: f"{plain(split.upper())} Succ.")


def _add_mean(values: pd.DataFrame) -> pd.DataFrame:
    """Adds the mean over the test lists for runs that have all of them; nothing if there is one list."""
    ends = [name for name in values if name.endswith(" Succ.")]
    if len(ends) < 2:
        return values
    return values.assign(**{"mean of the lists, Succ.": values[ends].mean(axis=1, skipna=False)})


def _rows(
    arms: Iterable[tuple[str, pd.DataFrame]], counted: str, show: Callable[[Estimate | None], str]
) -> list[dict[str, str]]:
    """Formats a row for each arm with a value: its name, the largest number of seeds, and one estimate per column."""
    counts = [(name, values, max(values.count(), default=0)) for name, values in arms]
    return [
        {"arm": plain(name), counted: str(count)} | {column: show(estimate(values[column])) for column in values}
        for name, values, count in counts
        if count
    ]


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Formats a Markdown table, one row per mapping; the first column is text, the others are numbers."""
    if not rows:
        return ""
    lines = [[*rows[0]], ["---", *["---:"] * (len(rows[0]) - 1)], *([*row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


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
    if found is None:
        return NOTHING
    mean, low, high = (f"{100 * share:+.1f}" for share in (found.mean, found.low, found.high))
    text = mean if found.count == 1 else f"{mean} ({low} to {high})"
    return re.sub(r"[+-](0\.0)\b", r"\1", text)
