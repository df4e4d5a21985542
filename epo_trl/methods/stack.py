"""The methods of a run as one: they follow each other in the order of the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from epo_trl.methods.base import Batch, Credit, Group, Method, MicroBatch, Need, Ranks, StepSummary
from epo_trl.methods.entropy_meter import EntropyMeter
from epo_trl.types import Episode

_MARK = "marks/{method}/{name}"  # in TRL's batch


class Methods(Mapping[str, Method]):
    """The methods by name. `epo_trl.methods.methods_of` makes them of a configuration.

    Args:
        methods: The first is the credit.
        max_turns: Longest episode.
    """

    def __init__(self, methods: Mapping[str, Method], max_turns: int):
        self._methods = dict(methods)
        self.meter = EntropyMeter(max_turns)
        self._shape_metrics: dict[str, float] = {}

    def __getitem__(self, name: str) -> Method:
        return self._methods[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def __len__(self) -> int:
        return len(self._methods)

    def need(self, what: Need) -> bool:
        """Returns whether a method needs that."""
        return any(what in method.needs for method in self.values())

    @property
    def readers_of_reference(self) -> list[str]:
        """The names of the methods that ask the policy at the start of RL."""
        return [name for name, method in self.items() if method.needs & {Need.NUCLEUS, Need.FEATURES}]

    @property
    def readers_of_turn_rewards(self) -> list[str]:
        """The names of the methods that read the rewards of single turns or give them."""
        return [
            name
            for name, method in self.items()
            if Need.TURN_REWARDS in method.needs or type(method).turn_rewards is not Method.turn_rewards
        ]

    @property
    def cut(self) -> float | None:
        """The probability that makes a token one of the nucleus, or `None` if no method needs one."""
        return next((method.cut for method in self.values() if Need.NUCLEUS in method.needs), None)

    @property
    def top_p(self) -> float | None:
        """The probability that the policy's own nucleus holds, or `None` if no method needs one."""
        return next((method.top_p for method in self.values() if Need.TOP_P in method.needs), None)

    def described(self) -> str:
        """Returns what a model card says was used, in Markdown."""
        return " and ".join(filter(None, (method.described() for method in self.values())))

    def settings(self) -> dict[str, dict[str, Any]]:
        """Returns what each method was made with, defaults among it, but for what are fields of the configuration."""
        return {
            name: {
                field.name: getattr(method, field.name)
                for field in fields(method)  # type: ignore[arg-type]  # the registry takes dataclasses only
                if field.init and field.name not in method.config_fields
            }
            for name, method in self.items()
        }

    @property
    def choose_groups(self) -> bool:
        """Whether a method may refuse a group."""
        return any(type(method).keep is not Method.keep for method in self.values())

    # --- When a batch is collected -------------------------------------------------------------------------------

    def with_rewards(self, episode: Episode) -> Episode:
        """Returns the episode with the rewards that the methods give to its turns.

        Raises:
            ValueError: If a method returns another number of rewards than there are turns.
        """
        for name, method in self.items():
            rewards = method.turn_rewards(episode)
            if rewards is None:
                continue
            if len(rewards) != len(episode.turns):
                raise ValueError(f"{name}: got {len(rewards)} rewards for {len(episode.turns)} turns, takes one each")
            turns = (replace(turn, reward=float(x)) for turn, x in zip(episode.turns, rewards, strict=True))
            episode = replace(episode, turns=tuple(turns))
        return episode

    def keep(self, group: Group) -> bool:
        """Returns whether all methods want to train on a group."""
        return all(method.keep(group) for method in self.values())

    def credit(self, batch: Batch) -> Credit:
        """Returns the credit of the first method."""
        return next(iter(self.values())).credit(batch)

    def shape(self, advantages: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Returns (B, T) `advantages` and marks, as entries of TRL's batch."""
        marks: dict[str, Tensor] = {}
        self._shape_metrics = {}
        for method, hooks in self.items():
            shaped = hooks.shape(advantages, batch)
            advantages = shaped.advantages
            self._shape_metrics |= shaped.metrics
            marks |= {_MARK.format(method=method, name=name): mark for name, mark in shaped.marks.items()}
        return {"advantages": advantages, **marks}

    # --- In the loss ---------------------------------------------------------------------------------------------

    def ratio(self, logps: Tensor, old_logps: Tensor, turn_ids: Tensor, mask: Tensor) -> Tensor:
        """Returns the log-probabilities that the policy loss compares with the old ones."""
        for method in self.values():
            logps = method.ratio(logps, old_logps, turn_ids, mask)
        return logps

    def loss(self, micro: MicroBatch, batch: Mapping[str, Any]) -> Tensor | None:
        """Returns the sum of the terms, or `None` if there is none.

        Args:
            micro: The forward pass.
            batch: TRL's, which holds the marks.
        """
        terms = [method.loss(self._marked(name, micro, batch)) for name, method in self.items()]
        given = [term for term in terms if term is not None]
        return torch.stack(given).sum() if len(given) > 1 else given[0] if given else None

    def _marked(self, method: str, micro: MicroBatch, batch: Mapping[str, Any]) -> MicroBatch:
        prefix = _MARK.format(method=method, name="")
        marks = {name.removeprefix(prefix): mark for name, mark in batch.items() if name.startswith(prefix)}
        return replace(micro, marks=marks) if marks else micro

    # --- What is watched and kept ---------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, micro: MicroBatch) -> None:
        """Takes statistics of tokens that were scored by the policy that played."""
        self.meter.add(micro.entropy, micro.turn_ids, micro.mask)
        for method in self.values():
            method.measure(micro)

    def end_rl_step(self, ranks: Ranks, rl_step: int, total_rl_steps: int) -> dict[str, float]:
        """Returns the metrics of the RL step. Collective."""
        self.meter.reduce(ranks.sum)
        means, turn_means = self.meter.means(), self.meter.turn_means()
        self.meter.clear()
        step = StepSummary(means.get("all_tokens", float("nan")), turn_means, ranks, rl_step, total_rl_steps)
        metrics = {f"entropy/{part}": value for part, value in means.items()} | self._shape_metrics
        for method in self.values():
            metrics |= method.end_rl_step(step)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Returns what the methods keep from RL step to RL step."""
        return {name: method.state_dict() for name, method in self.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes it up. A method that the state does not know begins anew: other methods were asked for."""
        for name in state.keys() & self.keys():
            self[name].load_state_dict(state[name])

    def learned_state(self) -> dict[str, Any]:
        """Returns the tensors that methods keep from RL step to RL step, `{}` if none does."""
        states = {name: method.learned_state() for name, method in self.items()}
        return {name: state for name, state in states.items() if state}

    def load_learned_state(self, state: Mapping[str, Any]) -> None:
        """Takes them up, as `load_state_dict` does."""
        for name in state.keys() & self.keys():
            self[name].load_learned_state(state[name])

    def batch_state(self) -> dict[str, Any]:
        """Returns what this rank needs to go on inside of an RL step."""
        own = {name: method.batch_state() for name, method in self.items()}
        return {"meter": self.meter.state_dict(), "shape_metrics": self._shape_metrics, "methods": own}

    def load_batch_state(self, state: Mapping[str, Any]) -> None:
        """Takes it up."""
        self.meter.load_state_dict(state["meter"])
        self._shape_metrics = state["shape_metrics"]
        for name in state["methods"].keys() & self.keys():
            self[name].load_batch_state(state["methods"][name])
