"""Task suites in TRL's plain GRPOTrainer, as its `environment_factory`; see docs/other_worlds.md.

The reward equals that of `EPOTrainer` with the same settings. The environment returns it, so no reward function is
needed.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

from datasets import Dataset

from epo_trl.envs.base import Info, TaskSuite
from epo_trl.errors import InputError
from epo_trl.rollout import RolloutSettings
from epo_trl.rollout.running_episode import RunningEpisode
from epo_trl.types import StopReason

PROMPT = "You act in a world described in text. Call the tool `act` with one action at a time.\n"
OVER = "The episode is over."
Describe = Callable[[str, Info], str]


def task_dataset(suite: TaskSuite, split: str, *, prompt: str = PROMPT, seed: int = 0) -> Dataset:
    """Returns a dataset with one row per task of a list: `prompt`, `task_id`, and the `seed` of its episodes.

    TRL appends the task and the first observation to the `prompt`. The rows' seeds are drawn from `seed`.
    """
    chance = random.Random(seed)
    message = [{"role": "user", "content": prompt}]
    return Dataset.from_list(
        [{"prompt": message, "task_id": task, "seed": chance.randrange(2**31)} for task in suite.task_ids(split)]
    )


def describe(observation: str, info: Info) -> str:
    """Returns the observation, with the admissible actions if the environment lists them."""
    listed = info["admissible_actions"]
    return f"{observation}\nYou can: {', '.join(listed)}" if listed else observation


class SuiteEnvironment:
    """One environment in TRL's format: `act` is its only tool. Reward functions may read its public attributes."""

    def __init__(self, suite: TaskSuite, settings: RolloutSettings, describe: Describe) -> None:
        self._env, self._settings, self._describe = suite.make_env(), settings, describe
        self._verbatim = suite.verbatim or bool(suite.tools)
        weakref.finalize(self, self._env.close)
        self._episode = RunningEpisode("", 0, self._env, settings)
        self._report()

    def _report(self) -> None:
        episode = self._episode
        self.won, self.done, self.info = episode.stop is StopReason.WON, episode.stop is not None, episode.info
        self.turns, self.reward = len(episode.turns), sum(turn.reward for turn in episode.turns)
        self.invalid_actions = sum(not turn.is_valid for turn in episode.turns)

    def reset(self, task_id: str, seed: int = 0, **_: Any) -> str:
        """Starts an episode and returns the task and the first observation; equal seeds give equal starts."""
        self._episode = RunningEpisode(task_id, seed, self._env, self._settings)
        self._episode.start()
        self._report()
        return f"Your task is to: {self.info['task']}\n{self._describe(self._episode.observation, self.info)}"

    def act(self, action: str) -> str:
        """
        Take one action in the world.

        Args:
            action: The action as text

        Returns:
            What you see then.
        """
        if self.done or not self.info:
            raise InputError(OVER)
        self._episode.act(action, verbatim=self._verbatim)
        self._report()
        observation = self._episode.observation
        return f"{observation}\n{OVER}" if self.done else self._describe(observation, self.info)

    def get_reward(self) -> float:
        """Returns the episode's reward so far."""
        return self.reward


def as_environment_factory(
    suite: TaskSuite, settings: RolloutSettings | None = None, *, describe: Describe = describe
) -> Callable[[], SuiteEnvironment]:
    """Returns an `environment_factory` for TRL's trainers that plays a suite on the rows of `task_dataset`.

    TRL shows the model one growing conversation. It ends the episode when the model calls no tool, or when
    `max_completion_length`, which covers the whole episode there, is used up. `describe` formats an observation and its
    info as text; by default with the admissible actions.
    """
    rules = settings or RolloutSettings()
    return lambda: SuiteEnvironment(suite, rules, describe)
