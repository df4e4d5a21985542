"""Draws docs/trap.png, the README's picture, from the kept results of the study of the trap.

python docs/make_trap_figure.py
"""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from epo_trl.lab.plots import average_seeds, running_mean
from epo_trl.lab.study.config import load_study
from epo_trl.lab.study.outcomes import judge, select_arm
from epo_trl.lab.study.record import RECORDS, SUCCESS, Record, read_records

ROOT = Path(__file__).parent.parent
ARMS = {
    "GRPO": ("GRPO", "0.45"),
    "EPO, the paper's numbers": ("EPO, the paper's numbers", "C0"),
    "EPO .03, alpha 2": ("EPO, band stronger than bonus", "C3"),
    "KL .01": ("KL to the reference policy, .01", "C4"),
    "reference nucleus .1": ("entropy over the reference nucleus", "C1"),
    "reference nucleus .1 to 0": ("the same, falling to 0", "C2"),
}
BAR = 0.34  # height, where an arm has 1
LARGE, SMALL = 15, 13  # points: 10 and 9 pixels where a phone shows the picture 360 pixels wide


def draw() -> Figure:
    """Returns two panels from the records: success over training, and what became of each seed."""
    study = load_study(ROOT / "studies" / "trap.yaml")
    records = [*read_records(ROOT / "results" / "trap" / RECORDS).values()]
    figure = Figure(figsize=(7.2, 6.1), layout="constrained")
    curves, bars = figure.subplots(2, 1, height_ratios=[1, 1.15])
    _draw_curves(curves, records, study.smooth)
    _draw_bars(bars, judge(study, records))
    return figure


def _draw_curves(curves: Axes, records: list[Record], window: int) -> None:
    for arm, (_, color) in ARMS.items():
        smooth = [_smooth(record, window) for record in records if record.arm == arm]
        steps, mean, _, _ = average_seeds(smooth)
        for each in smooth:
            curves.plot(*each, color=color, linewidth=0.4, alpha=0.25)
        curves.plot(steps, mean, color=color, linewidth=2.6)
    curves.set(ylim=(-3, 103), xlim=(0, 400), yticks=[0, 25, 50, 75, 100])
    curves.set_title("Success in training, %: mean (thick) and seeds", fontsize=LARGE, loc="left")
    curves.set_xlabel("RL steps of 64 episodes", fontsize=SMALL)
    curves.tick_params(labelsize=SMALL)
    curves.spines[["top", "right"]].set_visible(False)
    curves.grid(alpha=0.25)


def _draw_bars(bars: Axes, outcomes: pd.DataFrame) -> None:
    """Draws one bar for each arm, in the colour of its curve and under its name, so that the names are the key."""
    longest = max(len(select_arm(outcomes, arm)) for arm in ARMS)
    for place, (arm, (label, color)) in enumerate(ARMS.items()):
        runs = select_arm(outcomes, arm)
        solved, trapped = runs.solved.sum(), runs.trapped.sum()
        between = len(runs) - solved - trapped
        bars.barh(place, len(runs), color="none", edgecolor=color, height=BAR)
        bars.barh(place, solved, color=color, height=BAR)
        bars.barh(place, between, left=solved, color=color, alpha=0.35, height=BAR)
        bars.text(0, place - 0.22, label, color=color, fontsize=SMALL, va="bottom", fontweight="bold")
        bars.text(longest + 0.2, place, f"{solved} of {len(runs)}", va="center", fontsize=SMALL)
    bars.invert_yaxis()
    bars.set(xlim=(0, longest * 1.16), ylim=(len(ARMS) - 0.6, -0.85), xticks=[], yticks=[])
    bars.set_title("Seeds that found the way out, with the key to the curves", fontsize=LARGE, loc="left")
    bars.spines[:].set_visible(False)
    looks = [{"color": "0.4"}, {"color": "0.4", "alpha": 0.35}, {"facecolor": "none", "edgecolor": "0.4"}]
    meanings = ["over 80 % success", "50 to 80 %", "under 50 %"]  # study.solved, study.trapped
    bars.legend(
        [Patch(**look) for look in looks], meanings, ncols=3, loc="upper center", frameon=False,
        bbox_to_anchor=(0.5, 0.0), fontsize=SMALL, handlelength=1.2, columnspacing=1.2,
    )  # fmt: skip


def _smooth(record: Record, window: int) -> tuple[np.ndarray, np.ndarray]:
    values = 100.0 * record.curve(SUCCESS)
    return values.index.to_numpy()[window - 1 :], running_mean(values.to_numpy(), window)


if __name__ == "__main__":
    draw().savefig(ROOT / "docs" / "trap.png", dpi=125, metadata={"Software": None})
