"""`model_init_kwargs` of a configuration, with which TRL loads a policy and its reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self


class InitKwargs(dict[str, Any]):
    """Completed `model_init_kwargs`. They remember those of the user, with which a second call begins."""

    given: Mapping[str, Any] | None = None

    @classmethod
    def complete(cls, given: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> Self:
        """Returns those of the user over defaults.

        Args:
            given: Those of a configuration, which may be completed already.
            defaults: Values for all that the user has not set.
        """
        given = given.given if isinstance(given, cls) else given
        made = cls({**defaults, **(given or {})})
        made.given = given
        return made


@contextmanager
def keeping_init_kwargs(args: Any) -> Iterator[None]:
    """Restores the `model_init_kwargs` that `policy_for_training` completes, so that `args` can load another model."""
    given = args.model_init_kwargs
    try:
        yield
    finally:
        args.model_init_kwargs = given
