"""Settings of ALFWorld for recipes and configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from epo_trl.bounds import CountOrZero, OneOf, check_bounds, copy_options, option
from epo_trl.envs.alfworld.alfworld_suite import AlfworldData, Engine, GeneratedAlfworld, Search
from epo_trl.envs.base import TaskSuite


@dataclass
class AlfworldArguments:
    """The choice of ALFWorld games and engine."""

    # Settings that a resumed run may change: they do not change what is learned.
    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset("alfworld_data n_iid n_ood".split())

    games: Annotated[str, OneOf(("data", "generated"))] = option(
        "data", "'data': the games in alfworld_data; 'generated': games made on the fly, no download."
    )
    alfworld_data: str | None = option(None, "Folder of the games; by default $ALFWORLD_DATA. For games='data'.")
    engine: Engine = option("fast", "'fast' (built in) or 'textworld' (ALFWorld's own).")
    task_types: list[str] | None = option(None, "Task types to include; all by default.")
    expert_search: Search = option(
        "random", "How the expert searches: 'random', or 'likely': first where training games have such objects."
    )
    n_train: CountOrZero = option(4000, "Number of generated training games.")
    n_iid: CountOrZero = option(200, "Number of generated test games in the training rooms.")
    n_ood: CountOrZero = option(200, "Number of generated test games in held-out rooms.")
    games_seed: int = option(0, "Seed of the generated games.")
    room_types: list[str] | None = option(None, "Rooms of generated games; all by default.")
    max_receptacles: int | None = option(
        None, "Maximum number of receptacles in a generated room; no limit by default."
    )

    def __post_init__(self) -> None:
        check_bounds(self)

    def make_suite(self) -> TaskSuite:
        """Creates the task suite.

        Raises:
            EnvError: If a filter is invalid, or the games are missing.
        """
        if self.games == "data":
            return copy_options(AlfworldData, self, path=self.alfworld_data)
        return copy_options(GeneratedAlfworld, self, seed=self.games_seed)
