"""Draws docs/trap.png, the README's picture, from the kept results of the study of the trap.

python docs/make_trap_figure.py
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from epo_trl.plots import average_seeds, running_mean
from epo_trl.study.config import load_study
from epo_trl.study.judge import SUCCESS, judge
from epo_trl.study.record import Record, read_record

ROOT = Path(__file__).parent.parent
ARMS = {
    "GRPO": ("GRPO", "0.45"),
    "EPO, the paper's numbers": ("EPO, the paper's\nnumbers", "C0"),
    "EPO .03, alpha 2": ("EPO, band stronger\nthan the bonus", "C3"),
    "KL .01": ("KL to the first\npolicy, .01", "C4"),
    "reference nucleus .1": ("entropy in the first\npolicy's nucleus", "C1"),
    "reference nucleus .1 to 0": ("the same, falling to 0", "C2"),
}


def main() -> None:
    """Reads the records and draws two panels: success over training, and what became of each seed."""
    study = load_study(ROOT / "studies" / "trap.yaml")
    records = [read_record(path) for path in sorted((ROOT / "results" / "trap" / "runs").glob("*.json"))]
    outcomes = judge(study, records)
    figure = Figure(figsize=(9.6, 3.3), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=[1.25, 1])
    for place, (arm, (_, color)) in enumerate(ARMS.items()):
        smooth = [_smooth(record, study.smooth) for record in records if record.arm == arm]
        steps, mean, _, _ = average_seeds(smooth)
        for each in smooth:
            curves.plot(*each, color=color, linewidth=0.4, alpha=0.25)
        curves.plot(steps, mean, color=color, linewidth=2.2)
        runs = list(outcomes[arm].values())
        solved, trapped = sum(bool(run.solved) for run in runs), sum(bool(run.trapped) for run in runs)
        bars.barh(place, solved, color=color, height=0.62)
        bars.barh(place, len(runs) - solved - trapped, left=solved, color=color, alpha=0.35, height=0.62)
        bars.text(len(runs) + 0.2, place, f"{solved} of {len(runs)}", va="center", fontsize=8, color="0.4")
    curves.set(ylim=(-3, 103), xlim=(0, 400))
    curves.set_title("success while training, %: seeds and their mean", fontsize=9)
    curves.set_xlabel("RL steps of 64 episodes", fontsize=8)
    bars.set_yticks(range(len(ARMS)), [label for label, _ in ARMS.values()], fontsize=8)
    for tick, (_, color) in zip(bars.get_yticklabels(), ARMS.values(), strict=True):
        tick.set_color(color)
    bars.invert_yaxis()
    bars.set(xlim=(0, max(len(runs) for runs in outcomes.values()) * 1.18), xticks=[])
    bars.set_title("seeds that found the way out", fontsize=9)
    bars.spines[["top", "right", "bottom"]].set_visible(False)
    curves.spines[["top", "right"]].set_visible(False)
    for axis in (curves, bars):
        axis.tick_params(labelsize=8)
    curves.grid(alpha=0.25)
    figure.savefig(ROOT / "docs" / "trap.png", dpi=110, metadata={"Software": None})


def _smooth(record: Record, window: int) -> tuple[np.ndarray, np.ndarray]:
    steps = np.array(record.curves["rl_step"], dtype=float)
    values = 100.0 * np.array(record.curves[SUCCESS], dtype=float)
    return steps[window - 1 :], running_mean(values, window)


if __name__ == "__main__":
    main()
