"""Schedules of a weight over the RL steps of a run."""

from __future__ import annotations

import math

from epo_trl.errors import InputError

SCHEDULES = ("constant", "linear", "cosine")


def scheduled_weight(
    rl_step: int, total_rl_steps: int, *, schedule: str, start: float, end: float | None = None
) -> float:
    """Returns the weight at RL step k of K, `start` at k = 0 and `end` at the last one, k = K - 1.

    With x = k / (K - 1), `linear` is `start + (end - start) * x`, `cosine` replaces x by `(1 - cos(pi * x)) / 2`, and
    `constant` stays at `start`. With K = 1 the weight is `start`. Past the last RL step, in a run resumed for more
    steps than its schedule, it stays at `end`.

    Args:
        rl_step: k, counted from 0.
        total_rl_steps: K.
        schedule: One of `SCHEDULES`.
        start: Weight at the first RL step.
        end: Weight at the last RL step; `None` with `constant`.
    """
    if end is None:
        return start
    progress = min(1.0, rl_step / max(total_rl_steps - 1, 1))
    return start + (end - start) * (progress if schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2)


def check_schedule(schedule: str, end_weight: float | None) -> None:
    """Raises `InputError` if the schedule is unknown, lacks an end weight, or has one that it would ignore.

    Args:
        schedule: One of `SCHEDULES`.
        end_weight: Weight at the last RL step, or `None`.
    """
    if schedule not in SCHEDULES:
        raise InputError(f"schedule: expected one of {SCHEDULES}, got {schedule!r}")
    if schedule == "constant" and end_weight is not None:
        raise InputError(f"end_weight: expected None with schedule 'constant', got {end_weight}")
    if schedule != "constant" and (end_weight is None or not 0 <= end_weight < math.inf):
        raise InputError(f"end_weight: expected a number >= 0 with schedule {schedule!r}, got {end_weight}")
