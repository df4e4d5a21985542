"""The settings of a pool."""

from __future__ import annotations

from dataclasses import dataclass

from epo_trl.bounds import Count, CountOrZero, Positive, check_bounds


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Distribution of environments over processes.

    Args:
        workers: Number of processes.
        step_seconds: Time limit of a step; a process that exceeds it is killed.
        reset_seconds: Time limit of a reset.
        reset_retries: Number of retries of a reset, each in a new process, after its process died or was killed.
    """

    workers: Count = 1
    step_seconds: Positive = 60.0
    reset_seconds: Positive = 120.0
    reset_retries: CountOrZero = 2

    def __post_init__(self) -> None:
        check_bounds(self)
