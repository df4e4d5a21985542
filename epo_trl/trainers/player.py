"""Plays episodes with the current policy: for training, for the test lists, and for whoever asks."""

from __future__ import annotations

from collections.abc import Sequence

from tqdm.auto import tqdm

from epo_trl.envs.base import TaskSuite, TextEnv
from epo_trl.envs.border import close_all
from epo_trl.evaluation.play import check_first_task
from epo_trl.rollout import ContextBuilder, RolloutSettings, RolloutTimes, play_episodes
from epo_trl.trainers.generation import TurnGenerator
from epo_trl.trainers.rules import Rules
from epo_trl.types import Episode


class Player:
    """Holds the environments, and makes more as they are needed.

    Args:
        suite: Where the environments come from.
        generator: The policy.
        waves: Parts into which a batch is split, see `rollout_waves`.
        quiet: Whether no progress is shown.
    """

    def __init__(self, suite: TaskSuite, generator: TurnGenerator, *, waves: int, quiet: bool):
        self.suite, self.generator = suite, generator
        self.envs: list[TextEnv] = []
        self._waves, self._quiet = waves, quiet

    def check_first_task(self, task_id: str, seed: int, rules: Rules) -> None:
        """Raises `ValueError` if a first task cannot be played by the rules, before anything is."""
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
        """Returns one episode per `(task_id, seed)`. Collective: every rank calls it, also with no task of its own."""
        self._provide(len(tasks))
        with (
            tqdm(total=len(tasks), desc=description, unit="episode", leave=False, disable=self._quiet) as bar,
            self.generator.keeping_prefixes(context),
        ):
            return play_episodes(
                self.envs,
                tasks,
                self.generator,
                context,
                settings,
                prompts_needed=self.generator.prompts_needed,
                on_finished=bar.update,
                times=times,
                waves=self._waves,
            )

    def _provide(self, count: int) -> None:
        while len(self.envs) < count:
            self.envs.append(self.suite.make_env())

    def close(self) -> None:
        """Frees what the environments hold, processes of theirs too. Playing again makes new ones."""
        close_all(self.envs)
