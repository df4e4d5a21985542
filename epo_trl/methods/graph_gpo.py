"""GraphGPO's credit (arXiv 2605.26684): a turn relative to others in its state, by how near to success it led."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from epo_trl.bounds import Range
from epo_trl.methods.anchors import EpisodeAndTurn, compare_by_key, sample_deviation
from epo_trl.methods.base import Batch
from epo_trl.methods.token_statistics import gather_by_key
from epo_trl.types import Episode

SUCCESS = ()  # unlike any state, which has an observation or a key


@dataclass
class GraphGPO(EpisodeAndTurn):
    """`A = A_E + step_weight * A_G`, equal for all tokens of a turn.

    `A_E` is GRPO's advantage of the episode. The states of a group's episodes, on all ranks, are the nodes of a graph
    and their turns the edges; d(s) is the number of turns on the shortest path from s to success, over the turns of all
    episodes. A turn that leads to s is worth `10 * omega ** d(s)`, as in the authors' code; Eq. 4 has one power more.
    `A_G` is that value relative to the turns that leave the same state, divided by their standard deviation. States
    without a path to success count as one turn farther than the farthest with one. A group without a success has `A_G`
    0.

    Args:
        anchor: "observation", as in the paper, or "state" (see `Anchored`).
        anchor_turns: Number of observations or states that must be equal; 1 in the paper.
        omega: Factor per turn of distance, above 0 and below 1. The authors' code uses 0.1.
        step_weight: Weight of `A_G`. The authors' code uses 1.
    """

    card = "[GraphGPO](https://arxiv.org/abs/2605.26684), omega {omega:g}"

    omega: Annotated[float, Range(above=0, below=1)] = 0.1

    def turn_advantages(self, batch: Batch) -> list[list[float]]:
        """Returns `A_G`."""
        edges = [
            [(group, edge) for edge in self._edges(episode)] if episode.is_usable else []
            for group, episode in zip(batch.group_ids.tolist(), batch.episodes, strict=True)
        ]
        distances = {group: distances_to_success(found) for group, found in gather_by_key(edges, batch).items()}
        worth = [[((group, start), self._worth(distances[group], end)) for group, (start, end) in row] for row in edges]
        return compare_by_key(worth, batch, divisor=sample_deviation)

    def _edges(self, episode: Episode) -> list[tuple[Any, Any]]:
        states: list[Any] = list(self.states(episode))
        if episode.won:
            states[-1] = SUCCESS
        return list(zip(states[:-1], states[1:], strict=True))

    def _worth(self, distances: dict[Any, int], end: Any) -> float:
        if not distances:
            return 0.0
        return float(10 * self.omega ** distances.get(end, max(distances.values()) + 1))


def distances_to_success(edges: Iterable[tuple[Any, Any]]) -> dict[Any, int]:
    """Returns the turns on the shortest path to `SUCCESS` from each state that has one; empty without a success."""
    before: dict[Any, set[Any]] = defaultdict(set)
    for start, end in edges:
        before[end].add(start)
    distances, border = {SUCCESS: 0} if SUCCESS in before else {}, [SUCCESS]
    while border:
        reached = {start for end in border for start in before.get(end, ()) if start not in distances}
        distances |= dict.fromkeys(reached, distances.get(border[0], 0) + 1)
        border = list(reached)
    return distances
