"""The record of a run: one small JSON file. Everything else in a study is computed from the records."""

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
from epo_trl.errors import InputError
from epo_trl.evaluation.report import TypeCount
from epo_trl.evaluation.report_files import report_files
from epo_trl.lab.study.run_plan import StudyRun
from epo_trl.runs.checkpoint_files import step_of, what_model
from epo_trl.runs.state_file import read_state, write_atomically

SUCCESS = "env/success_rate"
# Metrics kept for every RL step, since results are computed from them; others are thinned to about POINTS points.
COMPLETE = (
    SUCCESS, "env/invalid_actions", "entropy/all_tokens", "ref-nucleus/choice_entropy",
    "entropy/first_third", "entropy/middle_third", "entropy/last_third",
)  # fmt: skip
POINTS = 30
DIGITS = 3  # significant digits of a stored number
SUCCESS_DIGITS = 9  # those of the success rate: it is compared with levels, and a tie has to stay one
LEFT_OUT = ("time/", "eval_", "epoch", "step", "num_tokens", "total_flos", "train_", "learning_rate", "clip_ratio/",
            "completions/", "frac_reward_zero_std", "sampling/", "num_input_tokens_seen")  # fmt: skip


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One evaluation of one task list.

    Args:
        rl_step: RL steps trained before it.
        split: Name of the list.
        protocol: Name of the protocol.
        wins: Number of episodes won.
        episodes: Number of episodes.
        types: `[wins, episodes]` of each task type.
        counts: Other counts: turns, `invalid_turns`, `wait_turns`, `score_sum`, `stop_reasons`.
        rules: Checksum of the protocol's settings; empty if unknown.
    """

    rl_step: float
    split: str
    protocol: str
    wins: int
    episodes: int
    types: Mapping[str, Sequence[int]]
    counts: Mapping[str, Any]
    rules: str = field(default="", compare=False)

    @property
    def rate(self) -> float:
        """Success rate: wins over episodes."""
        return self.wins / self.episodes

    def is_comparable(self, other: EvaluationRecord) -> bool:
        """Returns whether both played as many tasks by one protocol. Where `rules` is unknown, the name decides."""
        known = self.rules and other.rules
        same_rules = not known or self.rules == other.rules
        return same_rules and (self.protocol, self.episodes) == (other.protocol, other.episodes)


@dataclass(frozen=True, slots=True)
class Record:
    """A finished run.

    Args:
        arm: Name of the method.
        seed: Seed of the run.
        digest: Checksum of `identity`.
        identity: Everything that determined the result.
        version: Version of this package.
        seconds: Wall time of all attempts, in seconds.
        curves: `{metric: values}`, one value for each entry of `curves["rl_step"]`; `None` where it was not logged.
        thinned: Other metrics in the same form; each value is the mean of several RL steps and labelled with the last.
        evaluations: Evaluations in chronological order.
        begins_with: Checksum of the weights before RL, or name and revision of the model; empty if unknown.
    """

    arm: str
    seed: int
    digest: str
    identity: Mapping[str, Any]
    version: str
    seconds: float
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    thinned: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    evaluations: Sequence[EvaluationRecord] = ()
    begins_with: str = ""

    def curve(self, *names: str) -> pd.Series:
        """Returns the first of these metrics that was logged, by RL step and without gaps; empty if none was."""
        for curves in (self.curves, self.thinned):
            for name in names:
                points = pd.Series(curves[name], curves["rl_step"], dtype=float) if name in curves else pd.Series()
                if points.notna().any():
                    return points.dropna()
        return pd.Series(dtype=float)


def collect(run: StudyRun, seconds: float) -> Record:
    """Builds the record of a finished run.

    Raises:
        InputError: If the run has no log.
        ValueError: If one of its files is corrupt.
    """
    updates = updates_per_rl_step(run.folder)
    points = rl_points(log_history(run.folder), updates)
    is_used = points.fillna(0).any() | points.columns.isin(COMPLETE)
    points = points.loc[:, is_used].sort_index(axis=1)
    complete = points.columns.isin(COMPLETE)
    assert run.arm is not None
    return Record(
        run.arm, run.seed, run.digest, run.identity, __version__, round(seconds, 1),
        _shorten(points.loc[:, complete]), _shorten(thin(points.loc[:, ~complete], POINTS)),
        _evaluations(run.folder, updates), _first_model(run),
    )  # fmt: skip


def _first_model(run: StudyRun) -> str:
    """Identifies the weights before RL by their checksum, or by the model's name and revision."""
    if run.needs is not None:
        return what_model(str(run.needs.folder))
    name, revision = (str(run.settings.get(key) or "") for key in ("model_name_or_path", "model_revision"))
    return "@".join(filter(None, (what_model(name), revision)))


def log_history(folder: Path) -> list[dict[str, Any]]:
    """Reads the trainer's log history over all attempts; with several trainers, that of the last one."""
    states = [state for state in folder.glob("**/checkpoint-*/trainer_state.json") if step_of(state.parent) >= 0]
    if not states:
        raise InputError(f"{folder} has no checkpoint and therefore no log; set a save_strategy other than 'no'")
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
    """Averages the logs of each RL step's optimizer steps: one row per RL step, from 1 on, one column per metric.

    A log of several RL steps holds their means, so each of them gets its values.

    Args:
        history: Log entries, each with its optimizer step as `step`.
        updates: Optimizer steps per RL step.
    """
    log = pd.DataFrame(list(history), columns=None if history else ["step"])
    steps = np.ceil(log["step"] / updates - 1e-9).astype(int).rename("rl_step")
    numbers = log.select_dtypes("number").replace([np.inf, -np.inf], np.nan)
    numbers = numbers.loc[:, [not name.startswith(LEFT_OUT) for name in numbers]]
    points = numbers.groupby(steps).mean().dropna(how="all").dropna(how="all", axis=1)
    last = points.index.max() if len(points) else 0
    return points.reindex(pd.RangeIndex(1, last + 1, name="rl_step"), method="bfill")


def thin(curves: pd.DataFrame, points: int) -> pd.DataFrame:
    """Averages groups of neighbouring rows down to `points` rows, each labelled with the last RL step of its group."""
    groups = np.arange(len(curves)) // (-(-len(curves) // points) or 1)
    return curves.groupby(groups).mean().set_axis(curves.index.to_series().groupby(groups).last())


def _shorten(curves: pd.DataFrame) -> dict[str, list[float | None]]:
    if not len(curves):
        return {}
    return {"rl_step": curves.index.tolist()} | {
        name: [_short(value, SUCCESS_DIGITS if name == SUCCESS else DIGITS) for value in curves[name]]
        for name in curves
    }


def _short(value: float, digits: int) -> float | None:
    if np.isnan(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short == int(short) else short


def _evaluations(folder: Path, updates: float) -> tuple[EvaluationRecord, ...]:
    found: list[EvaluationRecord] = []
    for file in report_files(folder).values():
        content = read_state(file, "step", "reports")
        try:
            found += [_evaluation(content["step"] / updates, report) for report in content["reports"]]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{file} is not an evaluation of a run ({error!r})") from error
    return tuple(found)


def _evaluation(rl_step: float, report: Mapping[str, Any]) -> EvaluationRecord:
    counts = {name: report.get(name) for name in ("turns", "invalid_turns", "wait_turns", "score_sum")}
    protocol = report["protocol"]
    rules = {name: value for name, value in protocol.items() if name not in ("name", "description")}
    total, types = TypeCount.from_dict(report), {name: TypeCount.from_dict(n) for name, n in report["types"].items()}
    return EvaluationRecord(
        round(rl_step, 2), report["split"], protocol["name"], total.wins, total.episodes,
        {name: [count.wins, count.episodes] for name, count in types.items()},
        {**counts, "stop_reasons": report["stop_reasons"]},
        hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()[:8],
    )  # fmt: skip


def write_record(path: Path, record: Record) -> None:
    """Writes the file atomically, with one line for each curve and each evaluation."""
    parts = []
    for name, value in asdict(record).items():
        text = _compact(value)
        if name in ("curves", "thinned"):
            text = _lines("{", [f"{_compact(key)}: {_compact(values)}" for key, values in value.items()], "}")
        elif name == "evaluations":
            text = _lines("[", [_compact(evaluation) for evaluation in value], "]")
        parts.append(f"{_compact(name)}: {text}")
    write_atomically(path, "{\n" + ",\n".join(parts) + "\n}\n")


def _lines(begin: str, items: list[str], end: str) -> str:
    return begin + ",".join(f"\n  {item}" for item in items) + end


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


def read_record(path: Path) -> Record:
    """Loads a record that `write_record` wrote.

    Raises:
        InputError: If the file is corrupt.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        evaluations = [EvaluationRecord(**evaluation) for evaluation in content.pop("evaluations")]
        record = Record(**content, evaluations=tuple(evaluations))
        for name in ("identity", "curves", "thinned"):
            if not isinstance(value := getattr(record, name), dict):
                raise TypeError(f"{name}: expected a mapping, got {value!r}")
        return record
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is not a record of a run ({error}); delete it to repeat the run") from error
