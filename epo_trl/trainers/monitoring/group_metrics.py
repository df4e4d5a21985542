"""Metrics of how much the members of a group differ. GRPO learns only from these differences."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from epo_trl.methods import Comm
from epo_trl.types import Episode


def group_metrics(episodes: Sequence[Episode], group_size: int, ranks: Comm) -> dict[str, float]:
    """Returns means over the groups with at least two usable members; `{}` if there are none. Collective.

    Args:
        episodes: Episodes of this rank. The episodes of a group are adjacent in the list over all ranks.
        group_size: Number of episodes per task.
        ranks: Communication with the other processes.
    """
    seen = ranks.gather(
        [(e.is_usable, e.won, e.total_reward, tuple(turn.action for turn in e.turns)) for e in episodes]
    )
    groups = [[member for member in seen[i : i + group_size] if member[0]] for i in range(0, len(seen), group_size)]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return {}
    return {
        "env/group_return_std": fmean(stdev(total for _, _, total, _ in group) for group in groups),
        "env/group_equal": fmean(len({won for _, won, _, _ in group}) == 1 for group in groups),
        "env/group_first_actions": fmean(len({actions[0] for *_, actions in group}) for group in groups),
        "env/group_actions": fmean(len({action for *_, actions in group for action in actions}) for group in groups),
    }
