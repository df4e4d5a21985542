"""Decision tokens: those where the policy that played had a choice. The others are forced."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from epo_trl.methods.base import Batch, Ranks


class Decisions:
    """Tells decision tokens from forced ones by their entropy, in the pass that scored the policy that played.

    A token is a decision if its entropy is above a cut, which is one number for the whole batch on all ranks: the
    `threshold`, or the largest entropy outside of the `top_share` of tokens. Tokens at the cut are forced, so are those
    without entropy. Only sampled tokens that the loss counts are looked at. Needs `Need.SCORES`.

    Args:
        threshold: The cut, in nats; or
        top_share: The share of tokens that are decisions, above 0, at most 1 (fewer where entropies are equal).

    Raises:
        ValueError: If both or none are given, or one is out of its range.
    """

    def __init__(self, threshold: float | None = None, top_share: float | None = None):
        if (threshold is None) == (top_share is None):
            raise ValueError(f"threshold, top_share: got {threshold} and {top_share}, takes one of them")
        if threshold is not None and not 0 <= threshold < float("inf"):
            raise ValueError(f"threshold: got {threshold}, takes a number >= 0 (nats)")
        if top_share is not None and not 0 < top_share <= 1:
            raise ValueError(f"top_share: got {top_share}, takes a number above 0, at most 1")
        self.threshold, self.top_share = threshold, top_share
        # Rows: decisions, forced tokens. Columns: sum of entropies, count.
        self._sums = torch.zeros(2, 2, dtype=torch.float64)

    def of(self, batch: Batch) -> Tensor:
        """Returns (B, T) booleans, true on decisions. Collective. `metrics` are then those of this batch."""
        assert batch.entropy is not None
        counted = batch.mask.bool()
        decisions = counted & (batch.entropy > self._cut(batch.entropy[counted], batch.ranks))
        parts = [batch.entropy[part].double() for part in (decisions, counted & ~decisions)]
        self._sums = torch.stack([torch.stack([part.sum(), part.new_tensor(len(part))]) for part in parts])
        return decisions

    def _cut(self, entropies: Tensor, ranks: Ranks) -> float:
        if self.threshold is not None:
            return self.threshold
        assert self.top_share is not None
        chosen = round(self.top_share * sum(ranks.gather([len(entropies)])))
        largest = entropies.topk(
            min(chosen + 1, len(entropies))
        ).values  # what a rank has beyond them cannot be the cut
        together = sorted(ranks.gather(largest.tolist()), reverse=True)
        return together[chosen] if chosen < len(together) else 0.0

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Returns mean entropies, in nats, and the share of tokens that are decisions. Collective."""
        sums, counts = ranks.sum(self._sums).unbind(1)
        names = ("entropy/decision_tokens", "entropy/forced_tokens")
        means = {name: (sums[i] / counts[i]).item() for i, name in enumerate(names) if counts[i]}
        return {**means, "entropy/decision_share": (counts[0] / counts.sum().clamp(min=1)).item()}

    def state_dict(self) -> dict[str, Tensor]:
        """Returns this rank's sums of the batch in use."""
        return {"decisions": self._sums}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes them up."""
        self._sums = state["decisions"]
