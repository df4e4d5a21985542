"""How a weight moves over the RL steps of a run."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "linear", "cosine")


def scheduled_weight(
    rl_step: int, total_rl_steps: int, *, schedule: str, start: float, end: float | None = None
) -> float:
    """Returns the weight at RL step k of K, `start` at k = 0 and `end` at the last one, k = K - 1.

    With x = k / (K - 1): `linear` is `start + (end - start) * x`, `cosine` puts `(1 - cos(pi * x)) / 2` in place of x,
    `constant` stays at `start`. With K = 1 the weight is `start`. Beyond the last RL step (a run that is resumed with
    more steps than its schedule) it stays at `end`.

    Args:
        rl_step: k, counted from 0.
        total_rl_steps: K.
        schedule: One of `SCHEDULES`.
        start: Weight of the first RL step.
        end: Weight of the last one; `None` with `constant`.

    Raises:
        ValueError: If `rl_step` is negative, `total_rl_steps` is not positive, or `check_schedule` refuses the others.
    """
    if rl_step < 0:
        raise ValueError(f"rl_step: got {rl_step}, takes an integer >= 0")
    if total_rl_steps < 1:
        raise ValueError(f"total_rl_steps: got {total_rl_steps}, takes an integer >= 1")
    check_schedule(schedule, end)
    if end is None:
        return start
    progress = min(1.0, rl_step / max(total_rl_steps - 1, 1))
    return start + (end - start) * (progress if schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2)


def check_schedule(schedule: str, end_weight: float | None) -> None:
    """Raises `ValueError` for a schedule that is unknown or has no end, and for an end that would be ignored.

    Args:
        schedule: The setting of that name.
        end_weight: The setting of that name.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}, takes one of {SCHEDULES}")
    if schedule == "constant" and end_weight is not None:
        raise ValueError(f"end_weight: got {end_weight}, takes none with schedule 'constant'")
    if schedule != "constant" and (end_weight is None or not 0 <= end_weight < math.inf):
        raise ValueError(f"end_weight: got {end_weight}, takes a number >= 0 with schedule {schedule!r}")
