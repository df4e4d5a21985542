"""The records of the runs, in one JSON file per study. Everything else in a report is computed from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from epo_trl import __version__
from epo_trl.evaluation.outcomes import left_band
from epo_trl.evaluation.report import report_files
from epo_trl.lab.study.config import StudyRun
from epo_trl.runs.files import read_state, step_of, what_model, write_atomically

RECORDS = "records.json"
SUCCESS, INVALID, ENTROPY = "env/success_rate", "env/invalid_actions", "entropy/all_tokens"
TOKENS = {"choices": "ref-nucleus/choice_entropy", "forced": "ref-nucleus/forced_entropy"}
THIRDS = {third: f"entropy/{third}_third" for third in ("first", "middle", "last")}
# Metrics with a value for every RL step, since results are computed from them, and metrics of about POINTS points.
COMPLETE = (SUCCESS, INVALID, ENTROPY, TOKENS["choices"])
THINNED = (TOKENS["forced"], "ref-nucleus/choice_share", "env/group_equal", "critic/explained_variance", "kl")
POINTS = 30
DIGITS = 3  # significant digits of a stored number
SUCCESS_DIGITS = 9  # those of the success rate: it is compared with levels, and a tie has to stay one


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One evaluation of one task list."""

    rl_step: float  # RL steps trained before it
    split: str
    protocol: str
    wins: int
    episodes: int
    types: Mapping[str, Sequence[int]]  # `[wins, episodes]` of each task type
    counts: Mapping[str, Any]  # turns, `invalid_turns`, `wait_turns`, `score_sum`, `stop_reasons`
    rules: str = ""  # checksum of the protocol's settings; empty if unknown

    @property
    def rate(self) -> float:
        """Success rate: wins over episodes."""
        return self.wins / self.episodes


@dataclass(frozen=True, slots=True)
class Record:
    """A finished run."""

    arm: str
    seed: int
    identity: Mapping[str, Any]  # everything that determined the result
    version: str  # of this package
    seconds: float  # wall time of all attempts
    # A value for each RL step from 1 on, `None` where the metric was not logged.
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    # A mean for each entry of `thinned["rl_step"]`, over the RL steps up to it.
    thinned: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    # RL step at which the entropy of each third of the episode left the band; empty if it was not logged.
    left_band: Mapping[str, int | None] = field(default_factory=dict)
    evaluations: Sequence[EvaluationRecord] = ()  # in chronological order
    begins_with: str = ""  # checksum of the weights before RL, or name and revision of the model; empty if unknown

    def curve(self, name: str) -> pd.Series:
        """Returns a metric by RL step and without gaps; empty if it was not logged."""
        values = self.curves.get(name, self.thinned.get(name, ()))
        steps = range(1, len(values) + 1) if name in self.curves else self.thinned["rl_step"] if values else ()
        return pd.Series(values, steps, dtype=float).dropna()


def collect(run: StudyRun, seconds: float) -> Record:
    """Builds the record of a finished run."""
    assert run.arm is not None
    updates = updates_per_rl_step(run.folder)
    points = rl_points(log_history(run.folder), updates)
    names = [name for name in THINNED if name in points]
    thinned = thin(points[names]).reset_index()
    thirds = {third: left_band(points[name].tolist()) for third, name in THIRDS.items() if name in points}
    return Record(
        run.arm,
        run.seed,
        run.identity,
        __version__,
        round(seconds, 1),
        curves={name: _shorten(name, points[name]) for name in COMPLETE if name in points},
        thinned={name: _shorten(name, values) for name, values in thinned.items()} if names else {},
        left_band={third: None if place is None else place + 1 for third, place in thirds.items()},
        evaluations=_evaluations(run.folder, updates),
        begins_with=_first_model(run),
    )


def _first_model(run: StudyRun) -> str:
    """Identifies the weights before RL by their checksum, or by the model's name and revision."""
    if run.needs is not None:
        return what_model(str(run.needs.folder))
    name, revision = (str(run.settings.get(key) or "") for key in ("model_name_or_path", "model_revision"))
    return "@".join(filter(None, (what_model(name), revision)))


def log_history(folder: Path) -> list[dict[str, Any]]:
    """Reads the trainer's log history over all attempts; with several trainers, that of the last one."""
    states = [state for state in folder.glob("**/checkpoint-*/trainer_state.json") if step_of(state.parent) >= 0]
    last = max(states, key=lambda state: (step_of(state.parent.parent), step_of(state.parent)))  # round and step
    return list(read_state(last, "log_history")["log_history"])


def updates_per_rl_step(folder: Path) -> float:
    """Returns the optimizer steps per RL step; 1 for a trainer that collects no batches."""
    end = folder / "_finished.json"
    settings = read_state(end, "settings")["settings"] if end.is_file() else {}
    steps = settings.get("steps_per_generation")
    if not steps:
        return 1.0
    return float(steps * settings.get("num_iterations", 1) / settings.get("gradient_accumulation_steps", 1))


def rl_points(history: Sequence[Mapping[str, Any]], updates: float) -> pd.DataFrame:
    """Averages the logs of each RL step's optimizer steps: one row per RL step, from 1 on, one column per kept metric.

    A log of several RL steps holds their means, so each of them gets its values. Log entries have their optimizer step
    as `step`; there are `updates` of these per RL step.
    """
    log = pd.DataFrame(list(history), columns=None if history else ["step"])
    steps = np.ceil(log["step"] / updates - 1e-9).astype(int).rename("rl_step")
    numbers = log.reindex(columns=[*COMPLETE, *THINNED, *THIRDS.values()]).astype(float)
    points = (
        numbers.replace([np.inf, -np.inf], np.nan).groupby(steps).mean().dropna(how="all").dropna(how="all", axis=1)
    )
    last = points.index.max() if len(points) else 0
    return points.reindex(pd.RangeIndex(1, last + 1, name="rl_step"), method="bfill")


def thin(curves: pd.DataFrame, points: int = POINTS) -> pd.DataFrame:
    """Averages groups of neighbouring rows down to `points` rows, each labelled with the last RL step of its group."""
    groups = np.arange(len(curves)) // (-(-len(curves) // points) or 1)
    return curves.groupby(groups).mean().set_axis(curves.index.to_series().groupby(groups).last())


def _shorten(name: str, values: pd.Series) -> list[float | None]:
    digits = SUCCESS_DIGITS if name == SUCCESS else DIGITS
    short = [None if np.isnan(value) else float(f"{value:.{digits}g}") for value in values]
    return [value if value is None or value != int(value) else int(value) for value in short]


def _evaluations(folder: Path, updates: float) -> tuple[EvaluationRecord, ...]:
    found: list[EvaluationRecord] = []
    for file in report_files(folder).values():
        content = read_state(file, "step", "reports")
        found += [_evaluation(content["step"] / updates, report) for report in content["reports"]]
    return tuple(found)


def _evaluation(rl_step: float, report: Mapping[str, Any]) -> EvaluationRecord:
    counts = {name: report.get(name) for name in ("turns", "invalid_turns", "wait_turns", "score_sum")}
    protocol = report["protocol"]
    rules = {name: value for name, value in protocol.items() if name not in ("name", "description")}
    types = {name: [count["wins"], count["episodes"]] for name, count in report["types"].items()}
    return EvaluationRecord(
        round(rl_step, 2),
        report["split"],
        protocol["name"],
        report["wins"],
        report["episodes"],
        types,
        {**counts, "stop_reasons": report["stop_reasons"]},
        hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()[:8],
    )


def write_records(path: Path, records: Mapping[str, Record]) -> None:
    """Writes the records of a study by the names of their runs, atomically, with one line for each curve."""
    write_atomically(path, _dump({name: asdict(record) for name, record in sorted(records.items())}, 3) + "\n")


def _dump(value: Any, depth: int) -> str:
    if not depth or not value or not isinstance(value, Mapping):
        return json.dumps(value, separators=(",", ":"))
    items = (f"{json.dumps(name)}: {_dump(content, depth - 1)}" for name, content in value.items())
    return "{\n" + ",\n".join(items) + "\n}"


def read_records(path: Path) -> dict[str, Record]:
    """Loads what `write_records` wrote; nothing if there is no such file."""
    content = read_state(path) if path.is_file() else {}
    return {
        name: Record(**{**given, "evaluations": tuple(EvaluationRecord(**one) for one in given["evaluations"])})
        for name, given in content.items()
    }
