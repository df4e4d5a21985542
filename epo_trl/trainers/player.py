"""Plays episodes with the current policy, for training, evaluation and direct calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm.auto import tqdm

from epo_trl.envs.base import TaskSuite, TextEnv
from epo_trl.envs.border import close_all
from epo_trl.evaluation.play import check_first_task
from epo_trl.rollout import ContextBuilder, RolloutSettings, RolloutTimes, play_episodes
from epo_trl.trainers.generation import PolicyEngine
from epo_trl.trainers.rules import RolloutRules
from epo_trl.types import Episode


@dataclass
class Player:
    """Plays episodes in a pool of environments that grows on demand.

    Args:
        suite: Suite that creates the environments.
        quiet: Whether to hide the progress bar.
        most: Number of environments that an engine without a barrier uses at most.

    Attributes:
        engine: Engine that samples the policy's responses; set when TRL has loaded the policy.
    """

    suite: TaskSuite
    quiet: bool
    most: int
    envs: list[TextEnv] = field(default_factory=list, init=False)
    engine: PolicyEngine = field(init=False)

    def check_first_task(self, task_id: str, seed: int, rules: RolloutRules) -> None:
        """Raises `ValueError` if the first task cannot be played with these rules."""
        self._provide(1)
        check_first_task(self.envs[0], task_id, seed, rules.context, rules.protocol)

    def play(
        self,
        tasks: Sequence[tuple[str, int]],
        context: ContextBuilder,
        settings: RolloutSettings,
        *,
        description: str = "episodes",
        times: RolloutTimes | None = None,
    ) -> list[Episode]:
        """Plays one episode per `(task_id, seed)`. Collective: every rank must call it, even without tasks."""
        count = len(tasks) if self.engine.in_step else min(len(tasks), self.most)
        self._provide(count)
        with (
            tqdm(total=len(tasks), desc=description, unit="episode", leave=False, disable=self.quiet) as bar,
            self.engine.rollout(context, count),
        ):
            return play_episodes(
                self.envs if self.engine.in_step else self.envs[:count],
                tasks,
                self.engine,
                context,
                settings,
                on_finished=bar.update,
                times=times,
            )

    def _provide(self, count: int) -> None:
        while len(self.envs) < count:
            self.envs.append(self.suite.make_env())

    def close(self) -> None:
        """Releases the environments and their processes. Playing again creates new ones."""
        close_all(self.envs)
