"""Stops a run when too many episodes of a batch are aborted, since training on the rest would hide the fault.

An episode whose first prompt does not fit counts as aborted: it has no turn to learn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from epo_trl.errors import EpoTrlError
from epo_trl.types import Episode

SHOWN = 3  # errors shown per rank
NO_TURN = "max_prompt_length leaves no room for its first prompt"


class TooManyAborted(EpoTrlError, RuntimeError):
    """More episodes of a batch were aborted than `max_aborted_share` allows."""


def first_errors(episodes: Sequence[Episode], rank: int) -> list[str]:
    """Returns the errors of the first aborted episodes of a rank."""
    aborted = [episode for episode in episodes if not episode.is_usable]
    return [f"rank {rank}, task {episode.task_id!r}: {episode.error or NO_TURN}" for episode in aborted[:SHOWN]]


def aborts_warning(share: float, errors: Sequence[str]) -> str:
    """Returns the warning for the first batch with aborted episodes.

    Args:
        share: Share of aborted episodes in the batch.
        errors: Error messages, see `first_errors`; the first one is shown.
    """
    return (
        f"{share:.0%} of the episodes of this batch were aborted; they are excluded from training and from rates "
        f"(see env/aborted). The first error: {errors[0]}"
    )


def check_aborts(
    share: float,
    limit: float,
    episodes: Sequence[Episode],
    rank: int,
    gather: Callable[[list[str]], list[str]],
    save: Callable[[], str | None],
) -> None:
    """Saves a checkpoint and raises `TooManyAborted` if the share of aborted episodes exceeds the limit. Collective.

    Args:
        share: Share of aborted episodes in the batch, over all ranks.
        limit: `max_aborted_share`.
        episodes: Episodes of this rank.
        rank: Rank of this process.
        gather: Concatenates the lists of all ranks.
        save: Saves a checkpoint if possible, and returns its path.
    """
    if share > limit:
        errors = gather(first_errors(episodes, rank))
        raise too_many_aborted(share, limit, errors, save())


def too_many_aborted(share: float, limit: float, errors: Sequence[str], checkpoint: str | None) -> TooManyAborted:
    """Returns the error that stops the run.

    Args:
        share: Share of aborted episodes in the batch.
        limit: `max_aborted_share`.
        errors: Error messages, see `first_errors`.
        checkpoint: Path of the checkpoint from before this batch, or `None`.
    """
    saved = f"the state before it is in {checkpoint}" if checkpoint else "nothing was saved inside an optimizer step"
    return TooManyAborted(
        f"max_aborted_share: {share:.0%} of the episodes of this batch were aborted, {limit:.0%} are allowed; the "
        f"batch was not trained on, and {saved}. The first errors:\n" + "\n".join(f"  {error}" for error in errors)
    )
