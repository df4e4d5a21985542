"""`epo-trl plot`: the paper's training curves, from the TensorBoard files of finished, running or resumed runs."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from epo_trl.cli.base import at_least, make_parser, say
from epo_trl.errors import InputError

Curve = tuple[np.ndarray, np.ndarray]  # steps, values


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes."""

    title: str
    tags: dict[str, str]  # TensorBoard tags, each with its line style
    percent: bool = False  # whether the values are ratios, plotted as 0 to 100
    dots: bool = False  # for values before smoothing, as evaluations are few and their running mean lags behind
    from_zero: bool = False  # so that small fluctuations look small


PANELS = (
    Panel("training reward", {"train/reward": "-"}),
    Panel("training success, %", {"train/env/success_rate": "-"}, percent=True),
    Panel(
        "entropy in nats: early turns (solid), late turns (dashed)",
        {"train/entropy/early_turns": "-", "train/entropy/late_turns": "--"},
    ),
    Panel("invalid turns, %", {"train/env/invalid_actions": "-"}, percent=True),
    Panel("IID success, %", {"eval/iid/success_rate": "-"}, percent=True, dots=True),
    Panel("OOD success, %", {"eval/ood/success_rate": "-"}, percent=True, dots=True),
)
TAGS = tuple(tag for panel in PANELS for tag in panel.tags)


def main(argv: Sequence[str]) -> int:
    """Writes the image and returns the exit code."""
    parser = make_parser(
        "plot", "Draws training reward, training, IID and OOD success, and the entropy of early and late turns."
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="output directory of a training run")
    add("--out", required=True, metavar="PNG", help="image file to write")
    label = "one per run; runs with equal ones are averaged (default: the path below their common folder, no -seedN)"
    add("--labels", nargs="+", metavar="LABEL", help=label)
    add("--window", type=at_least(1), default=10, help="number of points in the running mean (default: 10)")
    args = parser.parse_args(argv)
    say(f"wrote {plot_runs(args.runs, args.out, labels=args.labels, window=args.window)}")
    return 0


def read_run(run: str | Path, tags: Sequence[str] | None = TAGS) -> dict[str, Curve]:
    """Reads `{tag: (steps, values)}` of the logged tags among `tags` (`None`: all), with ascending steps.

    Searches the directory recursively. Where the steps go back, a run was resumed: what was logged of later steps
    before is left out, and the newest value of a step wins. Values that are not finite are left out.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = Path(run)
    files = sorted(folder.rglob("*tfevents*"))
    if not files:
        what = "not a directory" if not folder.is_dir() else "no TensorBoard event file in it or its subfolders"
        raise InputError(f"run: expected the output directory of a training run, got {folder} ({what})")
    # All attempts of one run share a folder `runs`: the last one of a path, since runs may lie in `runs` too.
    places = [f"/{file.relative_to(folder).parent.as_posix()}/" for file in files]
    several = sorted({place.rpartition("/runs/")[0].strip("/") or "." for place in places})
    if len(several) > 1:
        raise InputError(
            f"run: expected the output directory of one run, got {folder}, which holds several ({', '.join(several)}); "
            "pass these directories one by one"
        )
    events = []
    for file in files:
        reader = EventAccumulator(str(file), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
        scalars = ((tag, event) for tag in reader.Tags()["scalars"] for event in reader.Scalars(tag))
        events += [(event.wall_time, event.step, tag, event.value) for tag, event in scalars]
    log = pd.DataFrame(sorted(events), columns=["wall_time", "step", "tag", "value"])
    # A trainer that is to resume may evaluate at step 0.
    goes_on = log.step.where((log.step > 0) & log.tag.str.startswith(("train/", "eval/")), np.inf)
    kept = log[(log.step <= goes_on[::-1].cummin()[::-1]) & np.isfinite(log.value)]
    kept = kept.drop_duplicates(["tag", "step"], keep="last").sort_values("step", kind="stable")
    curves = {str(tag): (own.step.to_numpy(), own.value.to_numpy()) for tag, own in kept.groupby("tag", sort=False)}
    return {tag: curves[tag] for tag in (curves if tags is None else tags) if tag in curves}


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Averages each value with the `window - 1` values before it. The first `window - 1` values get no mean."""
    return pd.Series(values, dtype=float).rolling(window).mean().to_numpy()[window - 1 :]


def average_seeds(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Averages runs over the steps that all of them cover: `(steps, mean, lowest, highest)`.

    A run is interpolated linearly between its own points and not extrapolated, so the average ends where the shortest
    run ends. All four arrays are empty if no step is common to all runs.
    """
    first, last = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
    union = np.unique(np.concatenate([steps for steps, _ in curves]))
    steps = union[(union >= first) & (union <= last)]
    if not len(steps):
        return steps, steps, steps, steps
    values = np.stack([np.interp(steps, own_steps, own_values) for own_steps, own_values in curves])
    return steps, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def default_labels(runs: Sequence[str | Path]) -> list[str]:
    """Labels runs by their path below the folder that they share, without `-seedN` or `_seedN` at its end."""
    paths = [Path(run).resolve() for run in runs]
    shared = os.path.commonpath([path.parent for path in paths])
    return [re.sub(r"[-_]seed[-_]?\d+$", "", path.relative_to(shared).as_posix()) for path in paths]


def plot_runs(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    labels: Sequence[str] | None = None,
    window: int = 10,
    panels: Sequence[Panel] = PANELS,
) -> Path:
    """Plots the curves of run directories and returns the image file, by default `.png`.

    Runs with the same label are averaged; the range from lowest to highest is shaded. `window` is the number of points
    of the running mean, which is computed per run before averaging.
    """
    labels = default_labels(runs) if labels is None else labels
    if len(labels) != len(runs):
        raise InputError(f"labels: expected one per run, got {len(labels)} for {len(runs)} runs")
    path = Path(out)
    path = path if path.suffix else path.with_suffix(".png")
    groups: dict[str, list[dict[str, Curve]]] = {}
    for run, label in zip(runs, labels, strict=True):
        groups.setdefault(label, []).append(read_run(run, [tag for panel in panels for tag in panel.tags]))

    count = len(panels) + 1  # plus the legend
    columns = 2 if count == 4 else min(3, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(5 * columns, 3.75 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, axis in zip(panels, axes, strict=False):
        _draw_panel(axis, panel, groups, window)
    for axis in axes[len(panels) :]:
        axis.axis("off")
    lines = [Line2D([], [], color=f"C{index % 10}", linewidth=2.5) for index in range(len(groups))]
    names = [label if len(runs) == 1 else f"{label} ({len(runs)} runs)" for label, runs in groups.items()]
    legend = axes[len(panels)].legend(lines, names, loc="upper left", frameon=False, fontsize=11)
    for text in legend.get_texts():
        text.set_parse_math(False)
    note = f"Lines: running mean over {window} points, where there are as many. Pale: values before smoothing."
    if max(map(len, groups.values())) > 1:
        note += "\nRuns with one label: mean, shaded from lowest to highest."
    figure.supxlabel(note, fontsize=9, color="0.4")
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
            curves = [run[tag] for run in runs if tag in run]
            drawn |= bool(curves) and _draw_curve(axis, curves, f"C{index % 10}", style, panel, window)
    if panel.percent:
        axis.set_ylim(-3, 103)
    elif drawn and panel.from_zero:
        axis.set_ylim(bottom=0)
    if not drawn:
        is_logged = any(tag in run for runs in groups.values() for run in runs for tag in panel.tags)
        reason = "no common step of the runs of a label" if is_logged else "not logged by any run"
        text = "\n".join([reason, *panel.tags])
        axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes, color="0.4")


def _draw_curve(axis: Any, curves: list[Curve], color: str, style: str, panel: Panel, window: int) -> bool:
    """Draws one curve; returns whether there was anything to draw."""
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
    pale = (
        {"linestyle": "", "marker": ".", "alpha": 0.45}
        if panel.dots
        else {"linestyle": style, "linewidth": 0.7, "alpha": 0.3}
    )
    axis.plot(raw_steps, scale * raw_mean, color=color, **pale)
    return bool(len(steps))
