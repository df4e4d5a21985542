"""The report of a study, generated only from the study's file and the records of its runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from epo_trl.lab.study import tables
from epo_trl.lab.study.config import Study, shown
from epo_trl.lab.study.markdown import code, percent, plain, table
from epo_trl.lab.study.outcomes import (
    SUCCESS,
    by_arm,
    compare_starts,
    final_success,
    find_other_lists,
    find_pairs,
    judge,
    select_arm,
)
from epo_trl.lab.study.record import Record
from epo_trl.runs.state_file import write_atomically

REPORT, PICTURE = "report.md", "curves.png"


def write_report(study: Study, records: Sequence[Record], folder: Path) -> list[Path]:
    """Writes the report and, if any run has curves, a figure. Returns the files.

    Args:
        study: Study to report.
        records: Records of the finished runs.
        folder: Folder to write to.
    """
    outcomes = judge(study, records)
    written = [folder / REPORT]
    has_curves = any(record.curves for record in records)
    if has_curves:
        from epo_trl.lab.study.figure import draw

        draw(study, records, folder / PICTURE)
        written.append(folder / PICTURE)
    write_atomically(folder / REPORT, report(study, records, outcomes, picture=has_curves))
    return written


def report(study: Study, records: Sequence[Record], outcomes: pd.DataFrame, *, picture: bool) -> str:
    """Generates the report in Markdown. It contains no times, so an interrupted study has the same report.

    Args:
        study: Study to report.
        records: Records of the finished runs.
        outcomes: pd.DataFrame of the runs.
        picture: Whether there is a figure beside the report.
    """
    parts = [f"# {plain(study.name)}\n", plain(study.question.strip()) + "\n" if study.question else ""]
    parts += [f"Protocol: {plain(study.protocol.strip())}\n" if study.protocol else "", _origin(study, records)]
    tested = tables.paper_table(study, outcomes)
    parts += _section("Success on the test lists, %", tested, _evaluation_note(study, records))
    gains = "Percentage points: the end minus the same run before RL; mean over seeds, 95 % interval."
    parts += _section("Gain of RL on the test lists", tables.gains_table(study, outcomes), gains)
    base, differences = plain(study.baseline), tables.paper_differences(study, outcomes)
    shared = "Percentage points: mean over same-seed pairs, 95 % interval."
    parts += _section(f"Difference from {base} on the test lists", differences, shared)
    parts += _section("Training", tables.training_table(study, outcomes), _training_note(study))
    differences = tables.differences_table(study, outcomes)
    parts += _section(f"Difference from {base} in training", differences, _difference_note(study, outcomes))
    parts += _section("Each run", tables.seeds_table(study, outcomes), "Success in training at the end, %.")
    parts += _section("Where entropy leaves first", tables.thirds_table(outcomes), THIRDS_NOTE)
    parts += _section("Which tokens", tables.tokens_table(outcomes), TOKENS_NOTE)
    if picture:
        parts += ["## Curves\n", f"![curves]({PICTURE})\n"]
    parts += [
        "## Settings\n",
        _settings(study),
        _missing(study, records),
        _short(study, records),
        "## Caveats\n",
        _caveats(study, outcomes),
    ]
    return "\n".join(part for part in parts if part)


def _section(title: str, content: str, note: str) -> list[str]:
    return [f"## {title}\n", f"{note}\n", content] if content else []


def _origin(study: Study, records: Sequence[Record]) -> str:
    versions = ", ".join(sorted({record.version for record in records})) or "none yet"
    command = f"epo-trl study {shown(study.path)}"
    return (
        f"Reproduce it: {code(command + ' --results-dir FOLDER')}; from the kept results alone: "
        f"{code(command + ' --report-only')}. "
        f"Made with epo-trl {versions}.\n"
    )


def _evaluation_note(study: Study, records: Sequence[Record]) -> str:
    lists: dict[tuple[str, str, int], set[str]] = {}
    for one in (one for record in records for one in record.evaluations):
        lists.setdefault((one.split, one.protocol, one.episodes), set()).update(filter(None, [one.rules]))
    played = "; ".join(
        f"{plain(split)}: {count} tasks, "
        + (f"{len(rules)} protocols named {code(name)}" if len(rules) > 1 else f"protocol {code(name)}")
        for (split, name, count), rules in sorted(lists.items())
    )
    last = "the last evaluation" if study.eval_window == 1 else f"the last {study.eval_window} evaluations"
    return (
        "`Succ.*` is the best evaluation of a run, `Succ.` the mean of " + last + "; then mean ± standard deviation "
        f"over seeds (95 % interval of the mean, Student's t). {played}."
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


THIRDS_NOTE = (
    "RL step at which the entropy of a third of the episode's turns first left 0.3 to 1.5 times its start for ten RL "
    "steps in a row: median of the runs in which it did. In order: runs in which all three left, first third first."
)

TOKENS_NOTE = (
    "Mean entropy over the whole vocabulary at tokens where the reference policy gave more than the method's cut to "
    "two tokens or more (choices), and at all others (forced). Each value is the mean over a thirtieth of a run, then "
    "the median over runs, since a single explosion would dominate their mean."
)


def _settings(study: Study) -> str:
    parts = [("(warm start)", study.warm_start, "of its run")] if study.warm_start else []
    parts += [(plain(arm.name), arm.part, " ".join(map(str, arm.seeds))) for arm in study.arms]
    rows = []
    for name, part, seeds in parts:
        changes = ", ".join(f"{field}: {json.dumps(value, default=str)}" for field, value in part.changes.items())
        paths = [code(part.recipe.as_posix()), code(part.config.as_posix())]
        rows.append([name, *paths, code(changes) if changes else "as in the file", seeds])
    return table(["arm", "recipe", "config", "changes", "seeds"], rows).replace("---:", "---")


def _missing(study: Study, records: Sequence[Record]) -> str:
    there = {(record.arm, record.seed) for record in records}
    gone = {arm.name: [seed for seed in arm.seeds if (arm.name, seed) not in there] for arm in study.arms}
    return _runs("Missing", "These runs have not ended, or have failed:", gone)


def _short(study: Study, records: Sequence[Record]) -> str:
    """Lists the runs that have logged success, but for fewer RL steps than are averaged."""
    short: dict[str, list[int]] = {}
    for record in records:
        if record.curves.get(SUCCESS) and math.isnan(final_success(record, study)):
            short.setdefault(record.arm, []).append(record.seed)
    note = f"These runs have fewer RL steps than `window`, {study.window}, so the tables of training leave them out:"
    return _runs("Too short", note, short)


def _runs(title: str, note: str, by_arm: Mapping[str, Sequence[int]]) -> str:
    lines = [f"- {plain(name)}: {_seeds(seeds)}" for name, seeds in by_arm.items() if seeds]
    return "\n".join([f"## {title}\n\n{note}\n", *lines, ""]) if lines else ""


def _seeds(seeds: Sequence[int]) -> str:
    return f"seeds {' '.join(map(str, seeds))}"


def _caveats(study: Study, outcomes: pd.DataFrame) -> str:
    base, arms = select_arm(outcomes, study.baseline), dict(by_arm(outcomes))
    counts = sorted({len(runs) for runs in arms.values()}) or [0]
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    lines = [
        f"{seeds} seeds per arm: an interval covers the seeds, for these games and this model only.",
        "Student's intervals assume roughly normal values. Where runs either solve the task or do not, look at "
        "the counts and at each run.",
        "The best of several arms looks better than it is, and so does the best of several evaluations (`Succ.*`).",
    ]
    if (count := _compared(study, outcomes)) > 1:
        lines.append(
            f"All differences use the same runs of {plain(study.baseline)}: if those were lucky, every arm on "
            f"their seeds looks worse. Each interval is for one comparison, not corrected for {count}."
        )
    began = {name: compare_starts(runs, base) for name, runs in arms.items() if name != study.baseline}
    models = "models" if study.warm_start is None else "warm starts, as on another machine,"
    for name, starts in began.items():
        pair = f"{plain(name)} and {plain(study.baseline)}"
        if starts.unlike:
            lines.append(
                f"{pair} began differently ({_seeds(starts.unlike)}): other {models} or "
                "other rules of play. They do not form pairs, so the differences leave them out."
            )
        if starts.played:
            lines.append(
                f"{pair} began with the same weights ({_seeds(starts.played)}), but their evaluations "
                "before RL differ: other random draws, as in another recipe, or other rules of play."
            )
        if differing := find_other_lists(arms[name], base):
            lines.append(
                f"{pair} played a test list by other protocols or with other numbers of games ({_seeds(differing)}), "
                "so the differences on the lists leave them out."
            )
    listed = "; ".join(
        plain(name) + ("" if len(starts.unknown) == len(arms[name]) else f" ({_seeds(starts.unknown)})")
        for name, starts in began.items()
        if starts.unknown
    )
    if listed and study.warm_start is not None:
        lines.append(
            f"The records do not show whether these runs and those of {plain(study.baseline)} began with the same "
            f"weights, and there was no evaluation before RL; they count as pairs: {listed}."
        )
    others = [plain(name) for name, runs in arms.items() if len(base) and set(runs.index) != set(base.index)]
    if others:
        lines.append(
            f"Not run on the same seeds as {plain(study.baseline)}: {'; '.join(others)}. Seeds differ in their warm "
            "start and games, so compare by the differences, which are over pairs, and not by the means of the "
            "arms."
        )
    few = [plain(name) for name, runs in arms.items() if len(runs) <= 3]
    if few:
        lines.append(f"With three seeds or fewer, an arm is an anecdote: {'; '.join(few)}.")
    return "\n".join(f"- {line}" for line in lines) + "\n"
