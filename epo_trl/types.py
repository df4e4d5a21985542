"""Core data types: an episode has turns, a turn has tokens. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

# Largest magnitude of a turn's reward. Returns are squared and summed in float32, whose maximum is 3.4e38: two returns
# of 1,000 such turns differ by at most 2e15, the square is 4e30, and the sum over a batch of a million tokens 4e36.
LARGEST_REWARD = 1e12


class StopReason(StrEnum):
    """Why an episode ended."""

    WON = "won"  # the environment terminated and the task is solved
    LOST = "lost"  # the environment terminated and the task is not solved
    TRUNCATED = "truncated"  # the environment itself truncated the episode
    TURN_LIMIT = "turn_limit"  # the rollout's turn limit was reached
    CONTEXT_FULL = "context_full"  # the next prompt does not fit, even without history
    ABORTED = "aborted"  # the environment failed; the episode carries no learning signal


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt, the response to it, and the environment's reaction.

    Args:
        prompt_ids: Token ids before the response. Windowed context: the whole prompt. Concatenated context: the tokens
            appended since the previous response.
        response_ids: Token ids as sampled, including the end-of-turn token. Never empty.
        response: The decoded response.
        observation: Text shown to the agent before it responded.
        action: Text passed to the environment.
        is_valid: Whether the response was well-formed and the action admissible.
        reward: Reward of this turn, including the invalid-action penalty.
        logprobs: Log-probabilities of `response_ids` at sampling time, in nats, or `None` where the generator does
            not return them.
        dropped_turns: Number of history turns left out because the prompt was too long.
        error: Reason why the action is invalid (`""` if it is valid).
        env_reward: Unweighted reward of the environment for the turn; 0.0 if the environment was not stepped.
        thought: Reasoning in the response, `""` if there is none.
        state_key: The environment's `info["state_key"]` before the action, `""` if it gives none.
    """

    prompt_ids: tuple[int, ...] = field(repr=False)
    response_ids: tuple[int, ...] = field(repr=False)
    response: str
    observation: str
    action: str
    is_valid: bool
    reward: float = 0.0
    logprobs: tuple[float, ...] | None = field(default=None, repr=False)
    dropped_turns: int = 0
    error: str = ""
    env_reward: float = 0.0
    thought: str = ""
    state_key: str = ""


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode of one task.

    Args:
        task_id: Id within the task suite, for example `"train/17"`.
        task: Natural-language description of the task.
        task_type: Kind of task, for averages per type.
        turns: Turns in order. An aborted episode may have none.
        stop: Reason why the episode ended.
        won: Whether the task was solved, by the success rule of the rollout.
        final_observation: Observation after the last action.
        error: Exception text of an aborted episode.
        seed: Seed passed to `reset`.
        score: Final score of the environment, if it keeps one.
        final_info: Last info of the environment. With `final_observation` it would have made the next prompt.
        left_out: Whether a method left the episode's group out of training.
    """

    task_id: str
    task: str
    task_type: str
    turns: tuple[Turn, ...]
    stop: StopReason
    won: bool = False
    final_observation: str = ""
    error: str = ""
    seed: int = 0
    score: float | None = None
    final_info: dict[str, Any] = field(default_factory=dict, repr=False)
    left_out: bool = False

    @property
    def total_reward(self) -> float:
        """Undiscounted sum of the turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def invalid_actions(self) -> int:
        """Number of turns with an invalid action."""
        return sum(not turn.is_valid for turn in self.turns)

    @property
    def is_usable(self) -> bool:
        """Whether the episode may enter the gradient and the group baseline."""
        return self.stop is not StopReason.ABORTED and bool(self.turns) and not self.left_out

    def without_tokens(self) -> Episode:
        """Returns a copy without token ids and info, small enough to send between ranks."""
        bare = tuple(replace(turn, prompt_ids=(), response_ids=(), logprobs=None) for turn in self.turns)
        return replace(self, turns=bare, final_info={})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Episode:
        """Rebuilds an episode from `dataclasses.asdict(episode)`, without token ids and info.

        Raises:
            KeyError, TypeError, ValueError: If `data` does not describe an episode.
        """
        bare: dict[str, Any] = {"prompt_ids": (), "response_ids": (), "logprobs": None}
        turns = tuple(Turn(**_known(Turn, turn) | bare) for turn in data["turns"])
        return cls(**_known(cls, data) | {"turns": turns, "stop": StopReason(data["stop"]), "final_info": {}})


def _known(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: data[field.name] for field in fields(kind) if field.name in data}
