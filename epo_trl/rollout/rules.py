"""The rules of a rollout: how long an episode may be, what is paid, and what counts as solved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

INVALID_ACTIONS = ("pass", "skip")
SUCCESS_RULES = {
    "won": "the engine's own `won`: the task is solved, whatever the reward",
    "ended-with-score": "the engine ended the episode, for whatever reason, with a score above 0 (exploitable)",
}

# Largest size of a turn's reward. Returns are squared and summed in float32, which ends at 3.4e38: two returns of 1,000
# such turns differ by 2e15 at most, the square is 4e30, and the sum over a million tokens of a batch 4e36.
LARGEST_REWARD = 1e12


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """The rules of a rollout.

    Args:
        max_turns: Turn budget of an episode.
        success_reward: Paid on the turn that solves the task.
        invalid_action_penalty: Subtracted on every turn whose action is not valid.
        env_reward_weight: Factor on the environment's own reward, added on every turn.
        invalid_action: Handling of an invalid action: `"pass"` hands it to the environment, which
            answers in its own words; `"skip"` leaves the environment alone and repeats the observation. Of an
            environment that lists no actions, only ill-formed ones can be skipped; the others it judges itself.
        require_think: Whether a response without reasoning is invalid.
        success_rule: A key of `SUCCESS_RULES`: what counts as solved.
        env_options: Handed to every `reset`, beside the task.
    """

    max_turns: int = 50
    success_reward: float = 10.0
    invalid_action_penalty: float = 0.1
    env_reward_weight: float = 0.0
    invalid_action: str = "pass"
    require_think: bool = True
    success_rule: str = "won"
    env_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns: expected an integer >= 1, got {self.max_turns}")
        if self.invalid_action not in INVALID_ACTIONS:
            raise ValueError(f"invalid_action: expected one of {INVALID_ACTIONS}, got {self.invalid_action!r}")
        if self.success_rule not in SUCCESS_RULES:
            raise ValueError(f"success_rule: expected one of {tuple(SUCCESS_RULES)}, got {self.success_rule!r}")
        if self.invalid_action_penalty < 0:
            raise ValueError(f"invalid_action_penalty: expected a number >= 0, got {self.invalid_action_penalty}")

    def is_won(self, terminated: bool, truncated: bool, info: Mapping[str, Any]) -> bool:
        """Returns whether an episode is solved.

        Args:
            terminated: Whether the environment has ended it.
            truncated: Whether it has cut it off.
            info: Last info dictionary.
        """
        if self.success_rule == "ended-with-score":
            return (terminated or truncated) and info["score"] > 0
        return bool(info["won"]) and terminated

    def reward(self, env_reward: float, *, won: bool, is_valid: bool) -> float:
        """Returns the reward of a turn.

        Args:
            env_reward: The environment's own.
            won: Whether the turn solved the task.
            is_valid: Whether its action was valid.
        """
        paid = self.env_reward_weight * env_reward + self.success_reward * won
        return paid if is_valid else paid - self.invalid_action_penalty
