"""The checker's exception."""

from __future__ import annotations

from epo_trl.envs.base import EnvError


class EnvCheckError(EnvError):
    """An environment violates the contract."""


def failure(wrong: str, fix: str) -> EnvCheckError:
    """Builds the error from the problem and its fix."""
    return EnvCheckError(f"{wrong}. Fix: {fix}.")


def require(holds: bool, wrong: str, fix: str) -> None:
    """Raises `EnvCheckError` unless a condition holds."""
    if not holds:
        raise failure(wrong, fix)
