"""Gymnasium's text environments: observations in a `Text` space, actions in a `Text` or a named `Discrete` space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from epo_trl.bounds import option, read_mapping
from epo_trl.envs.base import EnvError, Info
from epo_trl.envs.border import flag
from epo_trl.envs.numbered import NO_ACTION, NumberedArguments, NumberedEnv, shown


class GymnasiumEnv(NumberedEnv):
    """Wraps one Gymnasium environment. An action outside its space does not reach it."""

    given: GymnasiumArguments

    def __init__(self, given: GymnasiumArguments) -> None:
        super().__init__(given)
        self._game = _make(given)
        self._actions = _numbers(self._game, given)
        self._state: Mapping[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Returns the first observation of a task. Gymnasium's seed is the task's number; `seed` is not used."""
        number, rest = self._seed(options)
        observation, state = self._game.reset(seed=number, options=rest or None)
        return shown(observation), self._begin(self._listing(state))

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Performs an action."""
        self._check_running()
        known = action in self._actions if self._actions else self._game.action_space.contains(action)
        if not known:
            space = ", ".join(self._actions) or str(self._game.action_space)[:200]
            info = self._info(self._state, accepted=False, over=False, refusal=f"not in the action space: {space}")
            return NO_ACTION, 0.0, False, False, info
        given = self._actions[action] if self._actions else action
        observation, reward, terminated, truncated, state = self._game.step(given)
        ends = {"terminated": flag("terminated", terminated), "truncated": flag("truncated", truncated)}
        return shown(observation), *self._go_on(self._listing(state), float(reward), **ends)

    def _listing(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the environment's info, with the action names added where actions are numbers."""
        named = {self.given.actions_key: tuple(self._actions)} if self._actions else {}
        self._state = {**named, **state}
        return self._state

    def close(self) -> None:
        """Closes the environment."""
        self._game.close()


@dataclass(eq=False)
class GymnasiumArguments(NumberedArguments):
    """A Gymnasium environment with text observations and actions."""

    env_id: str = option("", "Id for `gymnasium.make`: 'Name-v0', or 'module:Name-v0'.")
    env_kwargs: dict[str, Any] | str | None = option(None, "Arguments for `gymnasium.make`, such as '{\"size\": 4}'.")
    action_names: list[str] | None = option(None, "Names of the actions of a `Discrete` space, in order.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.name = "".join(letter if letter.isalnum() else "-" for letter in f"gymnasium-{self.env_id}")
        self.env_kwargs = read_mapping("env_kwargs", self.env_kwargs)

    def make_suite(self) -> Self:
        """Returns the suite, whose environment can be made."""
        self.make_env().close()
        return self

    def make_env(self) -> GymnasiumEnv:
        """Creates a fresh environment."""
        return GymnasiumEnv(self)


def _make(given: GymnasiumArguments) -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise EnvError("environment: 'gymnasium' needs the package gymnasium; pip install gymnasium") from error
    try:
        game: Any = gymnasium.make(given.env_id, **read_mapping("env_kwargs", given.env_kwargs))
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise EnvError(f"env_id: got {given.env_id!r} with env_kwargs {given.env_kwargs!r}: {error}") from error
    if not isinstance(game.observation_space, gymnasium.spaces.Text):
        raise EnvError(
            f"env_id: expected observations in a Text space (see gymnasium.ObservationWrapper), got {given.env_id!r} "
            f"with {str(game.observation_space)[:100]}"
        )
    return game


def _numbers(game: Any, given: GymnasiumArguments) -> dict[str, int]:
    """Maps each action's name to its number; empty if actions are texts."""
    import gymnasium

    space, names = game.action_space, given.action_names or []
    if isinstance(space, gymnasium.spaces.Text) and not names:
        return {}
    if not isinstance(space, gymnasium.spaces.Discrete) or not len(names) == len(set(names)) == space.n:
        count = f"{space.n} different" if isinstance(space, gymnasium.spaces.Discrete) else "no"
        raise EnvError(f"action_names: expected {count} names for the actions {str(space)[:100]}, got {names}")
    return {name: int(space.start) + index for index, name in enumerate(names)}
