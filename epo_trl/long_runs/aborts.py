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


def check_aborts(
    share: float, limit: float, errors: Callable[[], Sequence[str]], save: Callable[[], str | None]
) -> None:
    """Saves a checkpoint and raises `TooManyAborted` if the share of aborted episodes exceeds the limit. Collective.

    Args:
        share: Share of aborted episodes in the batch, over all ranks.
        limit: `max_aborted_share`.
        errors: Collects the `first_errors` of all ranks.
        save: Saves a checkpoint if possible, and returns its path.
    """
    if share <= limit:
        return
    lines, checkpoint = errors(), save()
    saved = f"the state before it is in {checkpoint}" if checkpoint else "nothing was saved inside an optimizer step"
    raise TooManyAborted(
        f"max_aborted_share: {share:.0%} of the episodes of this batch were aborted, {limit:.0%} are allowed; the "
        f"batch was not trained on, and {saved}. The first errors:\n" + "\n".join(f"  {line}" for line in lines)
    )
