"""The rules of a rollout: turn limit, rewards, invalid actions and the success rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from epo_trl.bounds import Count, NonNegative, OneOf, check_bounds

INVALID_ACTIONS = ("pass", "skip")
SUCCESS_RULES = {
    "won": "the engine's own `won`: the task is solved, whatever the reward",
    "ended-with-score": "the engine ended the episode, for whatever reason, with a score above 0 (exploitable)",
}

# Largest magnitude of a turn's reward. Returns are squared and summed in float32, whose maximum is 3.4e38: two returns
# of 1,000 such turns differ by at most 2e15, the square is 4e30, and the sum over a batch of a million tokens 4e36.
LARGEST_REWARD = 1e12


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """The rules of a rollout.

    Args:
        max_turns: Turn budget of an episode.
        success_reward: Reward of the turn that solves the task.
        invalid_action_penalty: Penalty on every turn whose action is invalid.
        env_reward_weight: Weight of the environment's own reward, which is added on every turn.
        invalid_action: Handling of an invalid action: `"pass"` sends it to the environment, whose reply is the next
            observation; `"skip"` does not step the environment and repeats the observation. If the environment lists no
            actions, only ill-formed ones can be skipped; the environment itself judges the others.
        require_think: Whether a response without reasoning is invalid.
        success_rule: Key of `SUCCESS_RULES` that defines success.
        env_options: Further options for every `reset`.
    """

    max_turns: Count = 50
    success_reward: float = 10.0
    invalid_action_penalty: NonNegative = 0.1
    env_reward_weight: float = 0.0
    invalid_action: Annotated[str, OneOf(INVALID_ACTIONS)] = "pass"
    require_think: bool = True
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
