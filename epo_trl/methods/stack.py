"""Applies all methods of a run in the order of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from epo_trl.errors import InputError
from epo_trl.methods.base import Batch, Comm, Credit, Group, Method, MicroBatch, Need, Selection, StepSummary
from epo_trl.methods.entropy_meter import EntropyMeter
from epo_trl.types import LARGEST_REWARD, Episode


class Methods(dict[str, Method]):
    """The methods of a run by name. `epo_trl.methods.build_methods` builds them from a configuration.

    Args:
        methods: Methods by name. The first one assigns the credit.
        max_turns: Maximum number of turns per episode.
    """

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
        return [name for name, method in self.items() if method.needs & {Need.NUCLEUS, Need.FEATURES}]

    def overriding(self, hook: str) -> list[str]:
        """Returns the names of the methods that override a hook of `Method`."""
        return [name for name, method in self.items() if getattr(type(method), hook) is not getattr(Method, hook)]

    @property
    def cut(self) -> float | None:
        """Probability above which a token belongs to the reference nucleus; `None` if no method needs it."""
        return next((method.cut for method in self.values() if Need.NUCLEUS in method.needs), None)

    @property
    def top_p(self) -> float | None:
        """Total probability of the policy's own nucleus; `None` if no method needs it."""
        return next((method.top_p for method in self.values() if Need.TOP_P in method.needs), None)

    def model_card_text(self) -> str:
        """Returns the model card's description of the methods, in Markdown."""
        return " and ".join(filter(None, (method.model_card_text() for method in self.values())))

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

    @property
    def has_token_head(self) -> bool:
        """Whether the critic has a second head, for the values inside a turn."""
        return any(method.token_weight for method in self.values())

    # --- When a batch is collected -------------------------------------------------------------------------------

    def with_rewards(self, episode: Episode) -> Episode:
        """Returns the episode with the turn rewards assigned by the methods.

        Raises:
            InputError: If a method does not return one reward per turn, up to `LARGEST_REWARD`.
        """
        for name, method in self.items():
            rewards = method.turn_rewards(episode)
            if rewards is None:
                continue
            if len(rewards) != len(episode.turns):
                raise InputError(f"{name}: expected {len(episode.turns)} rewards, one per turn, got {len(rewards)}")
            paid = [float(reward) for reward in rewards]
            if wrong := [reward for reward in paid if not abs(reward) <= LARGEST_REWARD]:  # or not a number
                raise InputError(
                    f"{name}: expected rewards from {-LARGEST_REWARD:.0e} to {LARGEST_REWARD:.0e}, "
                    f"got {wrong[0]} in {episode.task_id!r}"
                )
            turns = (replace(turn, reward=reward) for turn, reward in zip(episode.turns, paid, strict=True))
            episode = replace(episode, turns=tuple(turns))
        return episode

    def select(self, groups: Sequence[Group]) -> list[set[Selection]]:
        """Returns the selections of all methods for each group of the batch."""
        return [set(each) for each in zip(*(method.select(groups) for method in self.values()), strict=True)]

    def credit(self, batch: Batch) -> Credit:
        """Returns the credit assigned by the first method."""
        return next(iter(self.values())).credit(batch)

    def modify_advantages(self, advantages: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Mapping[str, Tensor]]]:
        """Returns the modified (B, T) advantages, and the token annotations by method."""
        token_annotations: dict[str, Mapping[str, Tensor]] = {}
        self._batch_metrics = {}
        for name, method in self.items():
            shaped = method.modify_advantages(advantages, batch)
            advantages, token_annotations[name] = shaped.advantages, shaped.token_annotations
            self._batch_metrics |= shaped.metrics
        return advantages, token_annotations

    # --- In the loss ---------------------------------------------------------------------------------------------

    def ratio(self, logps: Tensor, old_logps: Tensor, turn_ids: Tensor, mask: Tensor) -> Tensor:
        """Returns the log-probabilities that enter the ratio with the old ones."""
        for method in self.values():
            logps = method.ratio(logps, old_logps, turn_ids, mask)
        return logps

    def loss(self, micro: MicroBatch, token_annotations: Mapping[str, Mapping[str, Tensor]]) -> Tensor | None:
        """Returns the sum of the methods' loss terms, or `None` if there is none.

        Args:
            micro: The forward pass.
            token_annotations: Those of these rows, by method.
        """
        terms = []
        for name, method in self.items():
            own = token_annotations.get(name)
            terms.append(method.loss(replace(micro, token_annotations=own) if own else micro))
        given = [term for term in terms if term is not None]
        return torch.stack(given).sum() if len(given) > 1 else given[0] if given else None

    # --- Metrics and state ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, micro: MicroBatch) -> None:
        """Collects statistics of tokens scored by the behaviour policy."""
        self.meter.add(micro.entropy, micro.turn_ids, micro.mask)
        for method in self.values():
            method.observe(micro)

    def end_rl_step(self, ranks: Comm, rl_step: int, total_rl_steps: int) -> dict[str, float]:
        """Returns the metrics of the RL step. Collective."""
        self.meter.reduce(ranks.sum)
        means, turn_means = self.meter.means(), self.meter.turn_means()
        self.meter.clear()
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
        return {"meter": self.meter.state_dict(), "batch_metrics": self._batch_metrics, "sums": sums}

    def load_batch_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state returned by `batch_state`."""
        self.meter.load_state_dict(state["meter"])
        self._batch_metrics = state["batch_metrics"]
        for name, method in self.items():
            method.tally.sums = state["sums"][name].cpu()
