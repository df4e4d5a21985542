"""A custom method: penalizes turns that repeat an action after the same observation.

Name it in a config or on the command line; its module must be importable:

    PYTHONPATH=recipes/my_method python recipes/alfworld_grpo_epo.py --config recipes/alfworld/tiny_cpu.yaml \
        --policy_method my_method:NoRepeats --method_kwargs '{"my_method:NoRepeats": {"penalty": 0.1}}'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from epo_trl.bounds import NonNegative
from epo_trl.methods import Method, StepSummary
from epo_trl.types import Episode


@dataclass
class NoRepeats(Method):
    """Subtracts `penalty` from the reward of a turn that repeats an action after the same observation."""

    penalty: NonNegative = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._counts = torch.zeros(2)  # repeated turns and all turns of this rank

    def turn_rewards(self, episode: Episode) -> Sequence[float]:
        """Returns the rewards of the turns, minus the penalty for repeated ones."""
        seen, rewards = set(), []
        for turn in episode.turns:
            tried = (turn.observation, turn.action)
            rewards.append(turn.reward - self.penalty * (tried in seen))
            self._counts += torch.tensor([tried in seen, 1.0])
            seen.add(tried)
        return rewards

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        """Returns the share of repeated turns over all ranks."""
        repeats, turns = step.ranks.sum(self._counts).tolist()
        self._counts.zero_()
        return {"no_repeats/share": repeats / max(turns, 1)}
