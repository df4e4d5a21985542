"""The rules of a rollout: turn limit, rewards, invalid actions and the success rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from epo_trl.bounds import Count, Finite, OneOf, Range, check_bounds, option
from epo_trl.rollout.spec import EpisodeArguments, ResponseArguments

INVALID_ACTIONS = ("pass", "skip")
SUCCESS_RULES = {
    "won": "the engine's own `won`: the task is solved, whatever the reward",
    "ended-with-score": "the engine ended the episode, for whatever reason, with a score above 0 (exploitable)",
}

# Largest magnitude of a turn's reward. Returns are squared and summed in float32, whose maximum is 3.4e38: two returns
# of 1,000 such turns differ by at most 2e15, the square is 4e30, and the sum over a batch of a million tokens 4e36.
LARGEST_REWARD = 1e12


@dataclass
class RewardArguments:
    """Rewards of a turn, and invalid actions.

    If the environment lists no actions, only ill-formed ones can be skipped; the environment judges the others.
    """

    invalid_action: Annotated[str, OneOf(INVALID_ACTIONS)] = option(
        "pass", "'pass' sends an invalid action to the environment; 'skip' only uses up the turn."
    )
    invalid_action_penalty: Annotated[float, Range(0, LARGEST_REWARD)] = option(
        0.1, "Invalid-action penalty: subtracted from the reward of each invalid turn."
    )
    success_reward: Annotated[float, Range(-LARGEST_REWARD, LARGEST_REWARD)] = option(
        10.0, "Reward for solving the task."
    )
    env_reward_weight: Finite = option(0.0, "Factor on the environment's own reward, added to every turn's reward.")


@dataclass
class RolloutSettings(RewardArguments):
    """The rules of a rollout.

    Args:
        max_turns: Turn budget of an episode.
        require_think: Whether a response without reasoning is invalid.
        success_rule: Key of `SUCCESS_RULES` that defines success.
        env_options: Further options for every `reset`.
    """

    max_turns: Count = EpisodeArguments.max_turns
    require_think: bool = ResponseArguments.require_think
    success_rule: Annotated[str, OneOf(tuple(SUCCESS_RULES))] = "won"
    env_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bounds(self)

    def is_won(self, terminated: bool, truncated: bool, info: Mapping[str, Any]) -> bool:
        """Returns whether an episode is solved.

        Args:
            terminated: Whether the environment ended the episode.
            truncated: Whether the environment cut the episode off.
            info: Last info dictionary.
        """
        if self.success_rule == "ended-with-score":
            return (terminated or truncated) and info["score"] > 0
        return bool(info["won"]) and terminated

    def reward(self, env_reward: float, *, won: bool, is_valid: bool) -> float:
        """Computes the reward of a turn.

        Args:
            env_reward: Reward from the environment.
            won: Whether the turn solved the task.
            is_valid: Whether the turn's action was valid.
        """
        paid = self.env_reward_weight * env_reward + self.success_reward * won
        return paid if is_valid else paid - self.invalid_action_penalty
