"""Settings of ALFWorld for recipes and configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from epo_trl.bounds import option
from epo_trl.envs.alfworld.alfworld_suite import AlfworldData, GeneratedAlfworld
from epo_trl.envs.base import EnvError, TaskSuite

GAMES = ("generated", "data")


@dataclass
class AlfworldArguments:
    """The choice of ALFWorld games and engine."""

    # Settings that a resumed run may change: they do not change what is learned.
    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset("alfworld_data n_iid n_ood".split())

    games: str = option("data", "'data': the games in alfworld_data; 'generated': games made on the fly, no download.")
    alfworld_data: str | None = option(None, "Folder of the games; by default $ALFWORLD_DATA. For games='data'.")
    engine: str = option("fast", "'fast' (built in) or 'textworld' (ALFWorld's own).")
    task_types: list[str] | None = option(None, "Task types to include; all by default.")
    expert_search: str = option(
        "random", "How the expert searches: 'random', or 'likely': first where training games have such objects."
    )
    n_train: int = option(4000, "Number of generated training games.")
    n_iid: int = option(200, "Number of generated test games in the training rooms.")
    n_ood: int = option(200, "Number of generated test games in held-out rooms.")
    games_seed: int = option(0, "Seed of the generated games.")
    room_types: list[str] | None = option(None, "Rooms of generated games; all by default.")
    max_receptacles: int | None = option(
        None, "Maximum number of receptacles in a generated room; no limit by default."
    )

    def make_suite(self) -> TaskSuite:
        """Creates the task suite.

        Raises:
            EnvError: If a field is invalid, or the games are missing.
        """
        if self.games == "data":
            return AlfworldData(
                self.alfworld_data,
                task_types=self.task_types,
                engine=self.engine,
                expert_search=self.expert_search,
            )
        if self.games != "generated":
            raise EnvError(f"games: expected one of {GAMES}, got {self.games!r}")
        return GeneratedAlfworld(
            n_train=self.n_train,
            n_iid=self.n_iid,
            n_ood=self.n_ood,
            seed=self.games_seed,
            task_types=self.task_types,
            room_types=self.room_types,
            max_receptacles=self.max_receptacles,
            engine=self.engine,
            expert_search=self.expert_search,
        )
