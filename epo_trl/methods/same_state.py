"""Credits that compare a turn with others that start from the same state: GiGPO, HGPO, GAGPO, GraphGPO.

`Anchored` explains the settings `anchor` and `anchor_turns`; the papers compare one observation, HGPO's up to 3 or 5.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any

from epo_trl.bounds import Count, Finite, Range, Share
from epo_trl.methods.anchors import (
    Anchored,
    EpisodeAndTurn,
    compare_by_key,
    largest_reward_sum,
    population_deviation,
    sample_deviation,
)
from epo_trl.methods.base import Batch
from epo_trl.methods.token_statistics import gather_by_key
from epo_trl.types import Episode

SUCCESS = ()  # unlike any state, which has an observation or a key


@dataclass
class GiGPO(EpisodeAndTurn):
    """`A = A_E + step_weight * A_S`, equal for all tokens of a turn.

    `A_E` is GRPO's advantage of the episode. Turns of one group, on all ranks, that start from the same state form an
    anchor group. `A_S` is the discounted return from a turn, minus the mean of its anchor group, divided by its
    standard deviation. A turn without another in its state has `A_S` 0.

    Args:
        gamma: Discount from turn to turn in `A_S`. The paper uses 0.95.
        step_weight: Weight of `A_S`. The paper uses 1.
        scale: Whether to divide `A_S` by the standard deviation of the anchor group. The paper describes both.
    """

    card = "[GiGPO](https://arxiv.org/abs/2505.10978)"

    gamma: Share = 0.95
    scale: bool = True

    def turn_advantages(self, batch: Batch) -> list[list[float]]:
        divisor, size = sample_deviation if self.scale else None, largest_reward_sum(batch)
        return compare_by_key(self.keyed_returns(batch, self.gamma), batch, divisor=divisor, size=size)


@dataclass
class HGPO(Anchored):
    """`A = sum_k w_k A_k / sum_k w_k` with `w_k = (k + 1) ** alpha`, equal for all tokens of a turn.

    `A_k` is the discounted return from a turn, relative to the turns of its group with the same last k observations,
    for k from 1 to `anchor_turns`. The sums run over the depths at which `A_k` is not 0, as in the authors' code.

    Args:
        gamma: Discount from turn to turn. The authors' code uses 0.95.
        anchor_turns: Largest depth.
        alpha: How much more a deeper comparison weighs. The paper uses 1.
    """

    card = "[HGPO](https://arxiv.org/abs/2602.22817), up to {anchor_turns} observations"

    anchor_turns: Count = 3
    gamma: Share = 0.95
    alpha: Finite = 1.0

    def turn_advantages(self, batch: Batch) -> list[list[float]]:
        size = largest_reward_sum(batch)
        by_depth = [
            compare_by_key(self.keyed_returns(batch, self.gamma, depth), batch, divisor=population_deviation, size=size)
            for depth in range(1, self.anchor_turns + 1)
        ]
        # A turn has as many depths as observations before and with it.
        return [
            [self._weighted_mean(depths[: k + 1]) for k, depths in enumerate(zip(*rows, strict=True))]
            for rows in zip(*by_depth, strict=True)
        ]

    def _weighted_mean(self, advantages: Sequence[float]) -> float:
        given = [(depth + 1, value) for depth, value in enumerate(advantages, 1) if value != 0]
        heaviest = (max if self.alpha > 0 else min)((base for base, _ in given), default=1)
        weights = [((base / heaviest) ** self.alpha, value) for base, value in given]  # at most 1: none overflows
        total = sum(weight for weight, _ in weights)
        return sum(weight * value for weight, value in weights) / total if weights else 0.0


@dataclass
class GAGPO(Anchored):
    """GAE from turn to turn, with a value that is the mean return of the group's turns in the same state.

        V(s) = mean discounted return from the group's turns in state s,  0 after the last turn
        delta_t = r_t + gamma V(s_t+1) - V(s_t),   A_t = delta_t + gamma gae_lambda A_t+1

    `A` is then normalized over all turns of the group.

    Args:
        gamma: Discount from turn to turn.
        gae_lambda: Lambda of GAE.
    """

    card = "[GAGPO](https://arxiv.org/abs/2605.13217), lambda {gae_lambda:g}"

    gamma: Share = 0.95
    gae_lambda: Share = 0.95

    def turn_advantages(self, batch: Batch) -> list[list[float]]:
        keyed = self.keyed_returns(batch, self.gamma)
        groups = gather_by_key(keyed, batch)
        rows: list[list[tuple[int, float]]] = []
        for turns, rewards in zip(keyed, batch.turn_rewards.tolist(), strict=True):
            values = [*(fmean(groups[key]) for key, _ in turns), 0.0]
            rows.append([])
            later = 0.0
            for k, ((group, _), _) in reversed(list(enumerate(turns))):
                delta = rewards[k] + self.gamma * values[k + 1] - values[k]
                later = delta + self.gamma * self.gae_lambda * later
                rows[-1].insert(0, (group, later))
        size = max((abs(value) for values in groups.values() for value in values), default=0.0)
        return compare_by_key(rows, batch, divisor=sample_deviation, size=size)


@dataclass
class GraphGPO(EpisodeAndTurn):
    """`A = A_E + step_weight * A_G`, equal for all tokens of a turn.

    `A_E` is GRPO's advantage of the episode. The states of a group's episodes, on all ranks, are the nodes of a graph
    and their turns the edges; d(s) is the number of turns on the shortest path from s to success. A turn that leads to
    s is worth `10 * omega ** d(s)`, as in the authors' code; Eq. 4 has one power more. `A_G` is that value relative to
    the turns that leave the same state, divided by their standard deviation.

    Args:
        omega: Factor per turn of distance, above 0 and below 1. The authors' code uses 0.1.
        step_weight: Weight of `A_G`. The authors' code uses 1.
    """

    card = "[GraphGPO](https://arxiv.org/abs/2605.26684), omega {omega:g}"

    omega: Annotated[float, Range(above=0, below=1)] = 0.1

    def turn_advantages(self, batch: Batch) -> list[list[float]]:
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
