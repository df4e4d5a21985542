"""The figure of a study: small multiples with one column per arm and the baseline in grey behind each."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

from epo_trl.lab.plots import average_seeds
from epo_trl.lab.study.config import Study
from epo_trl.lab.study.outcomes import name_lists
from epo_trl.lab.study.record import ENTROPY, INVALID, SUCCESS, TOKENS, Record

COLUMNS = 5
COLORS = 64  # of the file, which is a quarter as large as with all colors
OWN, BEHIND = "C0", "0.6"
# Panels: the metric, the label, and whether it is a share.
PANELS = {
    "success": (SUCCESS, "training success, %", True),
    "invalid": (INVALID, "invalid turns, %", True),
    "entropy": (ENTROPY, "entropy, nats", False),
    "choices": (TOKENS["choices"], "entropy at choices, nats", False),
    "forced": (TOKENS["forced"], "entropy at forced\ntokens, nats", False),
    "evaluations": ("", "test success, %", True),
}


def draw(study: Study, records: Sequence[Record], out: Path, panels: Sequence[str] | None = None) -> None:
    """Plots the curves of each arm: one column per arm, one row per panel.

    Thin lines are seeds, the thick line is their mean; both are running means over the study's `smooth` RL steps. The
    grey line is the mean of the baseline over the seeds that both arms have. `panels` are names from `PANELS`; by
    default success and entropy in training, and success on the test lists if they were evaluated.
    """
    by_arm = {arm.name: [one for one in records if one.arm == arm.name] for arm in study.arms}
    arms = [name for name, each in by_arm.items() if any(record.curves for record in each)]
    name_of = name_lists(records)
    lists = list(dict.fromkeys(name_of(one) for record in records for one in record.evaluations))[:2]
    panels = ["success", "entropy", *(["evaluations"] if lists else [])] if panels is None else panels

    def draw_lines(axis: Any, panel: str, runs: Sequence[Record], color: str) -> None:
        metric, _, is_share = PANELS[panel]
        scale = 100 if is_share else 1
        if panel != "evaluations":
            _draw(axis, [scale * _smooth(record, metric, study.smooth) for record in runs], color, "-")
            return
        for name, style in zip(lists, ("-", "--"), strict=False):
            rates = [{one.rl_step: one.rate for one in run.evaluations if name_of(one) == name} for run in runs]
            _draw(axis, [scale * pd.Series(each, dtype=float) for each in rates], color, style)

    columns = min(COLUMNS, len(arms))
    bands = -(-len(arms) // columns)
    figure = Figure(figsize=(2.9 * columns + 0.6, 1.9 * len(panels) * bands + 0.5), layout="constrained")
    axes = figure.subplots(bands * len(panels), columns, squeeze=False)
    for row, panel in enumerate(panels):
        metric, label, is_share = PANELS[panel]
        label += f"\n{' -- '.join(lists)}" if panel == "evaluations" else ""
        top = pd.Series([record.curve(metric).max() for record in records]).max()  # of all, so that arms compare
        for index, name in enumerate(arms):
            axis = axes[index // columns * len(panels) + row, index % columns]
            seeds = {record.seed for record in by_arm[name]}
            paired = [record for record in by_arm[study.baseline] if record.seed in seeds and record.arm != name]
            draw_lines(axis, panel, paired, BEHIND)
            draw_lines(axis, panel, by_arm[name], OWN)
            axis.set_ylim(*((-3, 103) if is_share else (-0.03 * top, 1.05 * top) if top > 0 else (None, None)))
            axis.grid(alpha=0.25)
            axis.tick_params(labelsize=7)
            if row == 0:
                axis.set_title(name if len(name) < 40 else f"{name[:38]}…", fontsize=9, parse_math=False)
            if index % columns == 0:
                axis.set_ylabel(label, fontsize=7, parse_math=False)
    for axis in axes.flatten():
        if not axis.has_data():
            axis.axis("off")
    note = f"RL steps; grey: the mean of {study.baseline} on the same seeds"
    figure.supxlabel(note, fontsize=7, color="0.4", parse_math=False)
    image = BytesIO()
    figure.savefig(image, dpi=90)
    out.parent.mkdir(parents=True, exist_ok=True)
    Image.open(image).convert("RGB").quantize(COLORS).save(out, optimize=True)


def _smooth(record: Record, metric: str, window: int) -> pd.Series:
    """Returns the running mean of a metric; as it is if it is thinned, so already of means, or short."""
    values = record.curve(metric)
    is_long = metric in record.curves and len(values) > 2 * window
    return values.rolling(window).mean().dropna() if is_long else values


def _draw(axis: Any, curves: Sequence[pd.Series], color: str, style: str) -> None:
    drawn = [(curve.index.to_numpy(), curve.to_numpy()) for curve in curves if len(curve)]
    if not drawn:
        return
    for steps, values in drawn if color == OWN and len(drawn) > 1 else ():
        axis.plot(steps, values, color=color, linestyle=style, linewidth=0.6, alpha=0.5)
    steps, mean, _, _ = average_seeds(drawn)
    marker = "o" if len(steps) == 1 else None
    axis.plot(steps, mean, color=color, linestyle=style, linewidth=1.8, marker=marker, markersize=3)
