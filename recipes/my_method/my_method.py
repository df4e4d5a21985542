"""A method of your own: turns that try the same thing again in the same place cost something.

A config or the command line names it; Python has to find the module:

    PYTHONPATH=recipes/my_method python recipes/alfworld_grpo_epo.py --config recipes/alfworld/tiny_cpu.yaml \
        --policy_method my_method:NoRepeats --method_kwargs '{"my_method:NoRepeats": {"penalty": 0.1}}'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from epo_trl.methods import Method, StepSummary
from epo_trl.types import Episode


@dataclass
class NoRepeats(Method):
    """Subtracts `penalty` from the reward of a turn whose action was taken before after the same observation."""

    penalty: float = 0.5

    def __post_init__(self) -> None:
        if not self.penalty >= 0:
            raise ValueError(f"penalty: expected a number >= 0, got {self.penalty}")
        self._counts = torch.zeros(2)  # turns that repeat, and all turns, of this rank

    def turn_rewards(self, episode: Episode) -> Sequence[float]:
        """Returns the rewards of the turns, less the penalty where it is due."""
        seen, rewards = set(), []
        for turn in episode.turns:
            tried = (turn.observation, turn.action)
            rewards.append(turn.reward - self.penalty * (tried in seen))
            self._counts += torch.tensor([tried in seen, 1.0])
            seen.add(tried)
        return rewards

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        """Returns the share of turns that repeat, over all ranks."""
        repeats, turns = step.ranks.sum(self._counts).tolist()
        self._counts.zero_()
        return {"no_repeats/share": repeats / max(turns, 1)}
