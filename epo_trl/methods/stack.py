"""Applies all methods of a run in the order of the configuration."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from epo_trl.errors import InputError
from epo_trl.methods.base import Batch, Comm, Credit, Group, Method, MicroBatch, Need, Selection, Statistic, StepSummary
from epo_trl.types import LARGEST_REWARD, Episode

Annotations = Mapping[str, Mapping[str, Tensor]]  # (B, T, ...) token annotations, by method and name
_PARTS = ("all_tokens", "early_turns", "late_turns", "first_third", "middle_third", "last_third")
MarkedStatistic = tuple[Statistic, Mapping[str, Tensor]]  # with its method's (B, T, ...) token annotations


def _own(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a method, without its name in their keys."""
    prefix = f"{method}/"
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _batch_of(method: str, batch: Batch) -> Batch:
    """Returns the batch with the statistics of a method alone."""
    scores = batch.scores and replace(batch.scores, statistics=_own(method, batch.scores.statistics))
    return replace(batch, scores=scores, reference=_own(method, batch.reference))


class EntropyMeter:
    """Accumulates the entropies of parts of an episode; means are taken only over the whole RL step.

    Early turns are the first half of each episode (including the middle turn of an odd number), late turns the rest.
    Turn t, from 0, of n belongs to third floor(3 t / n). Leftover turns go to the earlier thirds: an episode of one
    turn is a first third, one of two turns a first and a middle third.

    Args:
        max_turns: Number of turn indices with a separate mean.
    """

    def __init__(self, max_turns: int):
        self.max_turns = max_turns
        self.clear()

    def clear(self) -> None:
        """Resets the sums. Rows: sums and counts. Columns: the parts, then the turn indices."""
        self.sums = torch.zeros(2, len(_PARTS) + self.max_turns, dtype=torch.float64)

    @torch.no_grad()
    def add(self, entropy: Tensor, turn_ids: Tensor, response_mask: Tensor) -> None:
        """Adds (B, T) entropies in nats, with the turn of each token and a mask of those that count."""
        self.sums = self.sums.to(entropy.device)
        mask = response_mask.bool()
        turns = torch.where(mask, turn_ids, -1)
        number = turns.amax(1, keepdim=True) + 1
        early = mask & (2 * turns < number)
        third = 3 * turns // number.clamp(min=1)
        thirds = (mask & (third == i) for i in range(3))
        # Only masks, no indices: finding where a mask is true would synchronise with the device.
        parts = torch.stack([mask, early, mask & ~early, *thirds]).flatten(1)
        values = torch.where(mask, entropy, 0.0).to(self.sums.dtype).flatten()
        self.sums[:, : len(_PARTS)] += torch.stack([torch.where(parts, values, 0.0).sum(1), parts.sum(1)])
        index = turns.clamp(min=0, max=self.max_turns - 1).long().flatten() + len(_PARTS)
        self.sums.index_add_(1, index, torch.stack([values, mask.flatten().to(values.dtype)]))

    def take(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> tuple[dict[str, float], dict[int, float]]:
        """Returns mean entropies in nats over all ranks, and resets the sums. Collective.

        The first are those of the parts, `"all_tokens"` being the token-level mean; the second those of the turn
        indices. Parts and turns without tokens are left out.
        """
        sums, counts = sum_over_ranks(self.sums).tolist()
        self.clear()
        means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
        parts, turns = zip(_PARTS, means, strict=False), enumerate(means[len(_PARTS) :])
        return {p: mean for p, mean in parts if mean is not None}, {t: mean for t, mean in turns if mean is not None}


class Methods(dict[str, Method]):
    """The methods of a run by name; the first assigns the credit. `build_methods` builds them from a configuration."""

    def __init__(self, methods: Mapping[str, Method], max_turns: int):
        super().__init__(methods)
        self.meter = EntropyMeter(max_turns)
        self._batch_metrics: dict[str, float] = {}

    def need(self, what: Need) -> bool:
        """Returns whether any method requires this input."""
        return any(what in method.needs for method in self.values())

    @property
    def readers_of_reference(self) -> list[str]:
        """Names of the methods that use the reference policy."""
        return [name for name, method in self.items() if Need.FEATURES in method.needs or method.reference_statistics]

    def overriding(self, hook: str) -> list[str]:
        """Returns the names of the methods that override a hook of `Method`."""
        return [name for name, method in self.items() if getattr(type(method), hook) is not getattr(Method, hook)]

    def head_statistics(self, kind: str, token_annotations: Annotations | None = None) -> dict[str, MarkedStatistic]:
        """Returns the methods' statistics of the LM head of a kind, such as `"loss_statistics"`, by method and name."""
        return {
            f"{name}/{key}": (compute, (token_annotations or {}).get(name, {}))
            for name, method in self.items()
            for key, compute in getattr(method, kind).items()
        }

    def model_card_text(self) -> str:
        """Returns the model card's description of the methods, in Markdown."""
        cards = (
            method.card.format_map(ChainMap(vars(method), *map(vars, type(method).__mro__)))  # type: ignore[arg-type]
            for method in self.values()
        )
        return " and ".join(filter(None, cards))

    def settings(self) -> dict[str, dict[str, Any]]:
        """Returns the settings of each method, with defaults, without those that are fields of the configuration."""
        return {
            name: {
                field.name: getattr(method, field.name)
                for field in fields(method)  # type: ignore[arg-type]  # the registry only accepts dataclasses
                if field.init and field.name not in method.config_fields
            }
            for name, method in self.items()
        }

    # --- When a batch is collected -------------------------------------------------------------------------------

    def with_rewards(self, episode: Episode) -> Episode:
        """Returns the episode with the turn rewards assigned by the methods.

        Raises:
            InputError: If a reward of a method is not a number up to `LARGEST_REWARD`.
        """
        for name, method in self.items():
            rewards = method.turn_rewards(episode)
            if rewards is None:
                continue
            paid = [float(reward) for reward in rewards]
            if wrong := [reward for reward in paid if not abs(reward) <= LARGEST_REWARD]:  # or NaN, which TRL skips
                limits = f"{-LARGEST_REWARD:.0e} to {LARGEST_REWARD:.0e}"
                raise InputError(f"{name}: expected rewards from {limits}, got {wrong[0]} in {episode.task_id!r}")
            turns = (replace(turn, reward=reward) for turn, reward in zip(episode.turns, paid, strict=True))
            episode = replace(episode, turns=tuple(turns))
        return episode

    def select(self, groups: Sequence[Group]) -> list[set[Selection]]:
        """Returns the selections of all methods for each group of the batch."""
        return [set(each) for each in zip(*(method.select(groups) for method in self.values()), strict=True)]

    def credit(self, batch: Batch) -> Credit:
        """Returns the credit assigned by the first method."""
        name, method = next(iter(self.items()))
        return method.credit(_batch_of(name, batch))

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> tuple[Tensor, Annotations]:
        """Returns the modified (B, T) advantages, and the token annotations by method."""
        token_annotations: dict[str, Mapping[str, Tensor]] = {}
        self._batch_metrics = {}
        for name, method in self.items():
            modified = method.modify_advantages(advantages, _batch_of(name, batch))
            advantages, token_annotations[name] = modified.advantages, modified.token_annotations
            self._batch_metrics |= modified.metrics
        return advantages, token_annotations

    # --- In the loss ---------------------------------------------------------------------------------------------

    def ratio(self, logps: Tensor, old_logps: Tensor, turn_ids: Tensor, mask: Tensor) -> Tensor:
        """Returns the log-probabilities that enter the ratio with the old ones."""
        for method in self.values():
            logps = method.ratio(logps, old_logps, turn_ids, mask)
        return logps

    def loss(self, micro: MicroBatch, token_annotations: Annotations) -> Tensor | None:
        """Returns the sum of the methods' loss terms, or `None` if there is none."""
        terms = []
        for name, method in self.items():
            marks, statistics = token_annotations.get(name, {}), _own(name, micro.statistics)
            term = method.loss(replace(micro, token_annotations=marks, statistics=statistics))
            if term is not None:
                terms.append(term)
        return torch.stack(terms).sum() if terms else None

    # --- Metrics and state ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, micro: MicroBatch) -> None:
        """Collects statistics of tokens scored by the behaviour policy."""
        self.meter.add(micro.entropy, micro.turn_ids, micro.mask)
        for method in self.values():
            method.observe(micro)

    def end_rl_step(self, ranks: Comm, rl_step: int, total_rl_steps: int) -> dict[str, float]:
        """Returns the metrics of the RL step. Collective."""
        means, turn_means = self.meter.take(ranks.sum)
        step = StepSummary(means.get("all_tokens", float("nan")), turn_means, ranks, rl_step, total_rl_steps)
        metrics = {f"entropy/{part}": value for part, value in means.items()} | self._batch_metrics
        for method in self.values():
            metrics |= method.end_rl_step(step)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the methods that have some, equal on all ranks."""
        return {name: state for name, method in self.items() if (state := method.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state. Methods missing from it start fresh: the configuration has changed."""
        for name in state.keys() & self.keys():
            self[name].load_state_dict(state[name])

    def batch_state(self) -> dict[str, Any]:
        """Returns the state of this rank that is needed to resume within an RL step."""
        sums = {name: method.tally.sums for name, method in self.items()}
        return {"meter": self.meter.sums, "batch_metrics": self._batch_metrics, "sums": sums}

    def load_batch_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state returned by `batch_state`."""
        self.meter.sums, self._batch_metrics = state["meter"], state["batch_metrics"]
        for name, method in self.items():
            method.tally.sums = state["sums"][name].cpu()
