"""The settings of a pool."""

from __future__ import annotations

from dataclasses import dataclass

from epo_trl.envs.base import EnvError


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Distribution of environments over processes.

    Args:
        workers: Number of processes.
        step_seconds: Time limit of a step; a process that exceeds it is killed.
        reset_seconds: Time limit of a reset.
        reset_retries: Number of retries of a reset, each in a new process, after its process died or was killed.
    """

    workers: int = 1
    step_seconds: float = 60.0
    reset_seconds: float = 120.0
    reset_retries: int = 2

    def __post_init__(self) -> None:
        for name, least in {"workers": 1, "reset_retries": 0}.items():
            if getattr(self, name) < least:
                raise EnvError(f"{name}: expected an integer >= {least}, got {getattr(self, name)}")
        for name in ("step_seconds", "reset_seconds"):
            if not getattr(self, name) > 0:
                raise EnvError(f"{name}: expected a number > 0, got {getattr(self, name)}")
