"""What is logged about the groups of a batch: how much their members differ, which is all that GRPO learns from."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from epo_trl.methods import Ranks
from epo_trl.types import Episode


def group_metrics(episodes: Sequence[Episode], group_size: int, ranks: Ranks) -> dict[str, float]:
    """Returns means over the groups with at least two members that carry a signal; `{}` if there are none. Collective.

    Args:
        episodes: This rank's; the members of a group are neighbours in the list of all ranks.
        group_size: Episodes of a task.
        ranks: The other processes.
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
