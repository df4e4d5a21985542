"""The paper's training curves, drawn from the TensorBoard files of finished, running or resumed runs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from epo_trl.errors import InputError

Curve = tuple[np.ndarray, np.ndarray]  # steps, values


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes.

    Args:
        title: Title above the axes.
        tags: TensorBoard tags, each with its line style.
        percent: Whether the values are ratios, plotted as 0 to 100.
        dots: Whether to plot the unsmoothed values as dots. Evaluations are few, and their running mean lags far behind
            a rising curve.
        from_zero: Whether the axis begins at 0, so that small fluctuations look small.
    """

    title: str
    tags: dict[str, str]
    percent: bool = False
    dots: bool = False
    from_zero: bool = False


PANELS = (
    Panel("training reward", {"train/reward": "-"}),
    Panel("training success, %", {"train/env/success_rate": "-"}, percent=True),
    Panel(
        "entropy in nats: early turns (solid), late turns (dashed)",
        {"train/entropy/early_turns": "-", "train/entropy/late_turns": "--"},
    ),
    Panel("invalid turns, %", {"train/env/invalid_actions": "-"}, percent=True, from_zero=True),
    Panel("IID success, %", {"eval/iid/success_rate": "-"}, percent=True, dots=True),
    Panel("OOD success, %", {"eval/ood/success_rate": "-"}, percent=True, dots=True),
)
TAGS = tuple(tag for panel in PANELS for tag in panel.tags)


def read_run(run: str | Path, tags: Sequence[str] | None = TAGS) -> dict[str, Curve]:
    """Reads `{tag: (steps, values)}` of the logged tags among `tags` (`None`: all), with ascending steps.

    Searches the directory recursively. Where the steps go back, a run was resumed or started again: what was logged of
    later steps before is left out, and the newest value of a step wins. The values of step 0 belong to the run that
    follows them, so one that starts again without any has none. Values that are not finite are left out.
    """
    folder = Path(run)
    files = sorted(folder.rglob("*tfevents*"))
    if not files:
        what = "not a directory" if not folder.is_dir() else "no TensorBoard event file in it or its subfolders"
        raise InputError(f"run: expected the output directory of a training run, got {folder} ({what})")
    _need_one_run(folder, files)
    curves = {}
    for tag, known in _newest_branch(_read_in_order(files), tags).items():
        finite = [(step, value) for step, value in sorted(known.items()) if math.isfinite(value)]
        if finite:
            curves[tag] = (np.array([step for step, _ in finite]), np.array([value for _, value in finite]))
    return curves


def _newest_branch(events: Iterable[tuple[str, Any]], tags: Sequence[str] | None) -> dict[str, dict[int, float]]:
    """Returns the values of the tags by step, without those that a resumed run or one started again left behind."""
    points: dict[str, dict[int, float]] = {tag: {} for tag in tags or ()}
    start: dict[str, dict[int, float]] = {}  # values of step 0 after the last later step, so of the run that follows
    first, last = math.inf, 0
    for tag, event in events:
        if event.step and tag.startswith(("train/", "eval/")):  # a trainer that is to resume may evaluate at step 0
            if event.step < last and event.step <= first:  # started again
                points = {name: start.get(name, {}) for name in points}
            elif event.step < last:
                points = {name: {s: known[s] for s in known if s <= event.step} for name, known in points.items()}
            first, last, start = min(first, event.step), event.step, {}
        if tags is None or tag in points:
            points.setdefault(tag, {})[event.step] = event.value
            if not event.step:
                start[tag] = {0: event.value}
    return points


def _read_in_order(files: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Yields tag and event of each value, by wall time within a file, from the oldest file on."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = []
    for file in files:
        reader = EventAccumulator(str(file), size_guidance={"scalars": 0}, purge_orphaned_data=False)
        reader.Reload()
        events = [(tag, event) for tag in reader.Tags()["scalars"] for event in reader.Scalars(tag)]
        if events:
            found.append(sorted(events, key=_time))
    for events in sorted(found, key=lambda file: _time(file[0])):
        yield from events


def _time(tagged: tuple[str, Any]) -> tuple[float, int]:
    return tagged[1].wall_time, tagged[1].step


def _need_one_run(folder: Path, files: Sequence[Path]) -> None:
    """Raises `InputError` if the files belong to several runs. All attempts of one run share a folder `runs`."""
    places = [f"/{file.relative_to(folder).parent.as_posix()}/" for file in files]
    runs = {place.rpartition("/runs/")[0].strip("/") for place in places}  # the last one: runs may lie in `runs` too
    if len(runs) > 1:
        raise InputError(
            f"run: expected the output directory of one run, got {folder}, which holds several "
            f"({', '.join(sorted(run or '.' for run in runs))}); pass these directories one by one"
        )


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Averages each value with the `window - 1` values before it. The first `window - 1` values get no mean."""
    if window < 1:
        raise InputError(f"window: expected an integer >= 1, got {window}")
    if len(values) < window:
        return np.empty(0)
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=float)])
    return (sums[window:] - sums[:-window]) / window


def average_seeds(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Averages runs over the steps that all of them cover: `(steps, mean, lowest, highest)`.

    A run is interpolated linearly between its own points and not extrapolated, so the average ends where the shortest
    run ends. All four arrays are empty if no step is common to all runs.
    """
    first, last = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
    union = np.unique(np.concatenate([steps for steps, _ in curves]))
    steps = union[(union >= first) & (union <= last)]
    values = np.stack([np.interp(steps, own_steps, own_values) for own_steps, own_values in curves])
    if not len(steps):
        return steps, steps, steps, steps
    return steps, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def default_label(run: str | Path) -> str:
    """Returns the directory's name without a trailing `-seedN` or `_seedN`: seeds of one setting share a label."""
    name = Path(run).resolve().name
    return re.sub(r"[-_]seed[-_]?\d+$", "", name) or name


def _default_labels(runs: Sequence[str | Path]) -> list[str]:
    """Returns the default label of each run, after its folder where runs of several folders would share it."""
    labels = [default_label(run) for run in runs]
    places = {(label, Path(run).resolve().parent) for label, run in zip(labels, runs, strict=True)}
    count = Counter(label for label, _ in places)
    return [
        f"{Path(run).parent}/{label}" if count[label] > 1 else label for label, run in zip(labels, runs, strict=True)
    ]


def plot_runs(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    labels: Sequence[str] | None = None,
    window: int = 10,
    panels: Sequence[Panel] = PANELS,
) -> Path:
    """Plots the runs' curves and returns the image file.

    Args:
        runs: Run directories.
        out: Image file. Its suffix decides the format; the default is `.png`.
        labels: One label per run. Runs with the same label are averaged; the range from lowest to highest is shaded.
        window: Number of points of the running mean, which is computed per run before averaging.
        panels: Axes to draw; by default the paper's curves.
    """
    labels = _default_labels(runs) if labels is None else list(labels)
    if not runs:
        raise InputError("runs: expected at least one run directory, got none")
    if len(labels) != len(runs):
        raise InputError(f"labels: expected one per run, got {len(labels)} for {len(runs)} runs")
    path = Path(out)
    path = path if path.suffix else path.with_suffix(".png")
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise InputError(f"out: expected a file whose name ends in one of {', '.join(known)}, got {out}")
    groups: dict[str, list[dict[str, Curve]]] = {}
    for run, label in zip(runs, labels, strict=True):
        groups.setdefault(label, []).append(read_run(run, [tag for panel in panels for tag in panel.tags]))

    count = len(panels) + 1  # plus the legend
    columns = 2 if count == 4 else min(3, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(5 * columns, 3.75 * rows), layout="constrained")
    drawn_on, (legend, *rest) = np.split(figure.subplots(rows, columns, squeeze=False).flatten(), [len(panels)])
    for panel, axis in zip(panels, drawn_on, strict=True):
        _draw_panel(axis, panel, groups, window)
    _draw_legend(legend, groups)
    for axis in rest:
        axis.axis("off")
    figure.supxlabel(_note(columns, window, max(map(len, groups.values()))), fontsize=9, color="0.4")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _draw_panel(axis: Any, panel: Panel, groups: dict[str, list[dict[str, Curve]]], window: int) -> None:
    axis.set_title(panel.title, fontsize=10)
    axis.set_xlabel("step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.25)
    drawn = False
    for index, runs in enumerate(groups.values()):
        for tag, style in panel.tags.items():
            drawn |= _draw_curve(axis, [run[tag] for run in runs if tag in run], f"C{index % 10}", style, panel, window)
    if panel.percent:
        axis.set_ylim(-3, 103)
    elif drawn and panel.from_zero:
        axis.set_ylim(bottom=0)
    if not drawn:
        is_logged = any(tag in run for runs in groups.values() for run in runs for tag in panel.tags)
        reason = "no common step of the runs of a label" if is_logged else "not logged by any run"
        text = "\n".join([reason, *panel.tags])
        axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes, color="0.4")
        axis.set_xticks([])
        axis.set_yticks([])


def _draw_curve(axis: Any, curves: list[Curve], color: str, style: str, panel: Panel, window: int) -> bool:
    """Draws one curve; returns whether there was anything to draw."""
    if not curves:
        return False
    scale = 100.0 if panel.percent else 1.0
    if min(len(steps) for steps, _ in curves) <= window:
        window = 1  # too few points for a running mean
    smooth = [(steps[window - 1 :], scale * running_mean(values, window)) for steps, values in curves]
    steps, mean, low, high = average_seeds(smooth)
    marker = "o" if len(steps) == 1 else None
    axis.plot(steps, mean, color=color, linestyle=style, marker=marker, linewidth=1.8)
    if len(curves) > 1:
        axis.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
    raw_steps, raw_mean, _, _ = average_seeds(curves)
    if panel.dots:
        axis.plot(raw_steps, scale * raw_mean, color=color, linestyle="", marker=".", alpha=0.45)
    else:
        axis.plot(raw_steps, scale * raw_mean, color=color, linestyle=style, linewidth=0.7, alpha=0.3)
    return bool(len(steps))


def _draw_legend(axis: Any, groups: dict[str, list[dict[str, Curve]]]) -> None:
    axis.axis("off")
    lines = [Line2D([], [], color=f"C{index % 10}", linewidth=2.5) for index in range(len(groups))]
    names = [label if len(runs) == 1 else f"{label} ({len(runs)} runs)" for label, runs in groups.items()]
    for text in axis.legend(lines, names, loc="upper left", frameon=False, fontsize=11).get_texts():
        text.set_parse_math(False)


def _note(columns: int, window: int, seeds: int) -> str:
    """Explains the lines in a note as wide as `columns` panels."""
    parts = [f"Lines: running mean over {window} points, where there are as many.", "Pale: values before smoothing."]
    if seeds > 1:
        parts.append("Runs with one label: mean, shaded from lowest to highest.")
    return ("  " if columns > 2 else "\n").join(parts)
