"""The settings of a pool."""

from __future__ import annotations

from dataclasses import dataclass

from epo_trl.envs.base import EnvError


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How environments are spread over processes.

    Args:
        workers: Number of processes.
        step_seconds: Longest time that a step may take; a process that takes longer is killed.
        reset_seconds: Longest time that a reset may take.
        reset_retries: How often a reset is tried again, in a new process, if its process died or was killed.
    """

    workers: int = 1
    step_seconds: float = 60.0
    reset_seconds: float = 120.0
    reset_retries: int = 2

    def __post_init__(self) -> None:
        for name, least in {"workers": 1, "reset_retries": 0}.items():
            if getattr(self, name) < least:
                raise EnvError(f"{name}: got {getattr(self, name)}, takes an integer >= {least}")
        for name in ("step_seconds", "reset_seconds"):
            if not getattr(self, name) > 0:
                raise EnvError(f"{name}: got {getattr(self, name)}, takes a number > 0")
