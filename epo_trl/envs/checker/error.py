"""What the checker raises."""

from __future__ import annotations

from epo_trl.envs.base import EnvError


class EnvCheckError(EnvError):
    """An environment breaks the contract."""


def failure(wrong: str, mend: str) -> EnvCheckError:
    """Returns the error that says what is wrong and how to mend it."""
    return EnvCheckError(f"{wrong}. To mend it: {mend}.")


def require(holds: bool, wrong: str, mend: str) -> None:
    """Raises `EnvCheckError` unless something holds."""
    if not holds:
        raise failure(wrong, mend)
