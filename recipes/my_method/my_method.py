"""A custom method: penalizes turns that repeat an action after the same observation.

Name it in a config or on the command line; its module must be importable:

    PYTHONPATH=recipes/my_method python recipes/alfworld_grpo_epo.py --config recipes/alfworld/tiny_cpu.yaml \
        --policy_method my_method:NoRepeats --method_kwargs '{"my_method:NoRepeats": {"penalty": 0.1}}'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epo_trl.bounds import NonNegative
from epo_trl.methods import Method, StepSummary, Tally
from epo_trl.types import Episode


@dataclass
class NoRepeats(Method):
    """Subtracts `penalty` from the reward of a turn that repeats an action after the same observation."""

    penalty: NonNegative = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tally = Tally("repeats", "turns")  # of this rank; a checkpoint holds it

    def turn_rewards(self, episode: Episode) -> Sequence[float]:
        """Returns the rewards of the turns, minus the penalty for repeated ones."""
        seen, rewards = set(), []
        for turn in episode.turns:
            tried = (turn.observation, turn.action)
            rewards.append(turn.reward - self.penalty * (tried in seen))
            self.tally.add(repeats=tried in seen, turns=1)
            seen.add(tried)
        return rewards

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        """Returns the share of repeated turns over all ranks."""
        sums = self.tally.take(step.ranks)
        return {"no_repeats/share": sums["repeats"] / max(sums["turns"], 1)}
