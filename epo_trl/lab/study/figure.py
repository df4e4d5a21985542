"""The figure of a study: small multiples with one column per arm and the baseline in grey behind each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from epo_trl.lab.plots import average_seeds, running_mean
from epo_trl.lab.study.config import Study
from epo_trl.lab.study.outcomes import INVALID, SUCCESS, TOKENS
from epo_trl.lab.study.record import Record

COLUMNS = 5
OWN, BEHIND = "C0", "0.6"


# Panels: the metrics of which the first that a run has logged is drawn, the label, and whether it is a share.
PANELS: dict[str, tuple[tuple[str, ...], str, bool]] = {
    "success": ((SUCCESS,), "training success, %", True),
    "invalid": ((INVALID,), "invalid turns, %", True),
    "entropy": (("entropy/all_tokens", "entropy"), "entropy, nats", False),
    "choices": ((TOKENS["choices"],), "entropy at choices, nats", False),
    "forced": ((TOKENS["forced"],), "entropy at forced\ntokens, nats", False),
    "evaluations": ((), "test success, %", True),
}


def draw(study: Study, records: Sequence[Record], out: Path, panels: Sequence[str] | None = None) -> None:
    """Plots the curves of each arm: one column per arm, one row per panel.

    Thin lines are seeds, the thick line is their mean; both are running means over the study's `smooth` RL steps. The
    grey line is the mean of the baseline over the seeds that both arms have.

    Args:
        study: Study to plot.
        records: Records of the finished runs.
        out: Path of the PNG file.
        panels: Names from `PANELS`; by default success and entropy in training, and success on the test lists if they
            were evaluated.
    """
    by_arm = {arm.name: [one for one in records if one.arm == arm.name] for arm in study.arms}
    arms = [name for name, each in by_arm.items() if any(record.curves for record in each)]
    splits = list(dict.fromkeys(one.split for record in records for one in record.evaluations))[:2]
    panels = ["success", "entropy", *(["evaluations"] if splits else [])] if panels is None else panels
    columns = min(COLUMNS, len(arms))
    bands = -(-len(arms) // columns)
    figure = Figure(figsize=(2.9 * columns + 0.6, 1.9 * len(panels) * bands + 0.5), layout="constrained")
    axes = figure.subplots(bands * len(panels), columns, squeeze=False, sharex=False, sharey=False)
    # The maximum of all runs, so that arms can be compared.
    tops = {panel: pd.Series([record.curve(*PANELS[panel][0]).max() for record in records]).fillna(0.0).max() or 1.0
            for panel in panels}  # fmt: skip
    for index, name in enumerate(arms):
        seeds = {record.seed for record in by_arm[name]}
        paired = [record for record in by_arm[study.baseline] if record.seed in seeds and record.arm != name]
        for row, panel in enumerate(panels):
            axis = axes[index // columns * len(panels) + row, index % columns]
            if row == 0:
                axis.set_title(name if len(name) < 40 else f"{name[:38]}…", fontsize=9, parse_math=False)
            _draw(axis, panel, paired, study.smooth, splits, BEHIND)
            _draw(axis, panel, by_arm[name], study.smooth, splits, OWN)
            axis.grid(alpha=0.25)
            axis.tick_params(labelsize=7)
            _, label, is_share = PANELS[panel]
            axis.set_ylim(*((-3, 103) if is_share else (-0.03 * tops[panel], 1.05 * tops[panel])))
            if index % columns == 0:
                lists = f"\n{' -- '.join(splits)}" if panel == "evaluations" else ""
                axis.set_ylabel(label + lists, fontsize=7, parse_math=False)
    for axis in axes.flatten():
        if not axis.has_data():
            axis.axis("off")
    note = f"RL steps; grey: the mean of {study.baseline} on the same seeds"
    figure.supxlabel(note, fontsize=7, color="0.4", parse_math=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"partial-{out.name}")
    figure.savefig(partial, dpi=90, metadata={"Software": None})
    partial.replace(out)


def _draw(axis: Any, panel: str, records: Sequence[Record], smooth: int, splits: Sequence[str], color: str) -> None:
    if panel == "evaluations":
        for split, style in zip(splits, ("-", "--"), strict=False):
            _lines(axis, [_evaluations(record, split) for record in records], color, style)
        return
    names, _, is_share = PANELS[panel]
    curves = [record.curve(*names) for record in records]
    window = _points(curves, smooth)
    scale = 100.0 if is_share else 1.0
    smooth_curves = [
        pd.Series(scale * running_mean(curve.to_numpy(), window), curve.index[window - 1 :]) for curve in curves
    ]
    _lines(axis, smooth_curves, color, "-")


def _points(curves: Sequence[pd.Series], smooth: int) -> int:
    """Returns the number of points in a running mean over `smooth` RL steps; 1 if there are too few points.

    A point of a thinned curve already is the mean of several RL steps.
    """
    shortest = min((len(curve) for curve in curves if len(curve)), default=0)
    if shortest < 2:
        return 1
    apart = max(float(np.median(np.diff(curve.index))) for curve in curves if len(curve))
    window = max(1, int(smooth / apart))
    return window if shortest > 2 * window else 1


def _lines(axis: Any, curves: Sequence[pd.Series], color: str, style: str) -> None:
    drawn = [(curve.index.to_numpy(), curve.to_numpy()) for curve in curves if len(curve)]
    if not drawn:
        return
    for steps, values in drawn if color == OWN and len(drawn) > 1 else ():
        axis.plot(steps, values, color=color, linestyle=style, linewidth=0.6, alpha=0.5)
    steps, mean, _, _ = average_seeds(drawn)
    marker = "o" if len(steps) == 1 else None
    axis.plot(steps, mean, color=color, linestyle=style, linewidth=1.8, marker=marker, markersize=3)


def _evaluations(record: Record, split: str) -> pd.Series:
    rates = {one.rl_step: 100 * one.rate for one in record.evaluations if one.split == split}
    return pd.Series(rates, dtype=float)
