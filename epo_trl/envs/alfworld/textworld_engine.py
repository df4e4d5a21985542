"""ALFWorld in TextWorld's own engine: slow, and the reference for the fast engine."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

from epo_trl.envs.alfworld.game_files import Game
from epo_trl.envs.alfworld.refuse_code import refuse_code
from epo_trl.envs.base import EnvError


class TextWorldEngine:
    """One TextWorld environment that plays one game at a time. Not thread-safe.

    Raises:
        EnvError: If alfworld or textworld is not installed.
    """

    def __init__(self) -> None:
        self._env: Any = _make_env()
        self._loaded: Game | None = None

    def start(self, game: Game) -> TextWorldPlay:
        """Starts an episode of a game and ends the current one. Needs about a second, or half of it for the same game.

        Raises:
            EnvError: If the file contains text that TextWorld would run as code.
        """
        if game != self._loaded:
            refuse_code(game)
            self._loaded = None
            self._env.load(json.loads(game.as_json()))
            self._loaded = game
        return TextWorldPlay(self._env, self._env.reset())

    def close(self) -> None:
        """Frees the engine. May be called twice."""
        if self._env is not None:
            self._env.close()
            self._env = None


class TextWorldPlay:
    """One episode in TextWorld, with the methods of the fast engine's `State`."""

    def __init__(self, env: Any, state: Any) -> None:
        self._env, self._state = env, state

    @property
    def admissible(self) -> tuple[str, ...]:
        """Actions that have an effect now, sorted."""
        return tuple(self._state["admissible_commands"])

    @property
    def won(self) -> bool:
        """Whether the goal is reached now."""
        return bool(self._state["won"])

    def describe(self) -> str:
        """Returns the first observation without the banner and the task sentence."""
        _, room, *_ = self._state.feedback.split("\n\n")
        return room

    def copy(self) -> Any:
        """Raises `EnvError`: the engine cannot copy a running game."""
        raise EnvError("engine: expected 'fast' to copy a state, got 'textworld'")

    def key(self) -> str:
        """Raises `EnvError`: only the fast engine has its state as values."""
        raise EnvError("engine: expected 'fast' for state keys (anchor: state), got 'textworld'")

    def step(self, action: str) -> str:
        """Performs an action and returns the game's response, without the leading line break of `help`."""
        self._state, _, _ = self._env.step(action)
        return self._state.feedback.lstrip("\n")


def _make_env() -> Any:
    given = os.environ.get("ALFWORLD_DATA")
    if given is None:  # importing alfworld creates this folder, without the variable in the home folder
        os.environ["ALFWORLD_DATA"] = os.path.join(tempfile.gettempdir(), "alfworld")
    try:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.envs import PddlEnv
    except ImportError as error:
        raise EnvError(
            f"engine='textworld' needs the packages alfworld and textworld ({error}): pip install 'epo-trl[alfworld]'"
        ) from error
    finally:
        if given is None:
            os.environ.pop("ALFWORLD_DATA", None)
    return AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)), shuffle=False)
