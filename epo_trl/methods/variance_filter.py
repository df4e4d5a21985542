"""Leaves groups with little reward variance out of training (RAGEN-2, arXiv 2604.06268)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import pvariance

from epo_trl.bounds import Count, PositiveShare
from epo_trl.methods.base import Group, Method, Need, Selection

_EQUAL = 1e-12  # variance of returns that differ by rounding alone


@dataclass
class VarianceFilter(Method):
    """Trains on the groups with the largest reward variance until they hold `share` of the batch's variance.

    RAGEN-2 takes the variance of the rewards in a group for the signal-to-noise ratio of its gradient. A group whose
    returns are all equal is never trained on, and of groups with equal variance the first comes first.

    Args:
        share: Share of the sum of all groups' variances. RAGEN-2 uses 0.9. 1 leaves out the groups without variance.
        most: Largest number of groups to train on; `None` for all.
    """

    card = "the groups with {share:g} of the reward variance ([RAGEN-2](https://arxiv.org/abs/2604.06268))"
    needs = {Need.GROUPS}

    share: PositiveShare = 0.9
    most: Count | None = None

    def select(self, groups: Sequence[Group]) -> list[Selection]:
        variances = [_variance(group) for group in groups]
        wanted = self.share * (1 - 1e-9) * sum(variances)
        selected, covered = [Selection.LEAVE_OUT] * len(groups), 0.0
        for i in sorted(range(len(groups)), key=lambda i: -variances[i])[: self.most]:
            if covered >= wanted or variances[i] <= _EQUAL:
                break
            selected[i] = Selection.TRAIN
            covered += variances[i]
        return selected


def _variance(group: Group) -> float:
    """Returns the variance of the usable members' returns, 0 without any."""
    returns = [value for value, usable in zip(group.returns, group.usable, strict=True) if usable]
    return pvariance(returns) if returns else 0.0
