"""`ScienceWorldEnv`: one ScienceWorld world behind the interface of `epo_trl.envs.base`."""

from __future__ import annotations

import weakref
from copy import copy
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from epo_trl.bounds import OneOf, option
from epo_trl.envs.base import NOT_RUNNING, AsyncTextEnv, EnvError, Info
from epo_trl.envs.scienceworld.host import Host
from epo_trl.envs.scienceworld.tasks import find_task
from epo_trl.envs.scienceworld.world import Seen, World

AMBIGUITY = ("agent", "first")


@dataclass
class EngineRules:
    """Play on the engine."""

    simplification: str = option(
        "easy",
        "'easy', '' (none), or a comma-separated list from teleportAction, selfWateringFlowerPots, openContainers, "
        "openDoors and noElectricalAction.",
    )
    ambiguity: Annotated[str, OneOf(AMBIGUITY)] = option(
        "agent",
        "Who answers 'Ambiguous request: Please enter the number': 'agent', with a number or any other action, which "
        "withdraws the request; or 'first': the environment picks the first choice.",
    )
    list_actions: bool = option(
        False, "Whether to list the valid actions for prompts, which adds 40 to 80 ms per step."
    )
    failure_reward: float = option(
        0.0,
        "Environment reward for failing a task, in place of the engine's score of -100. Other steps are paid the "
        "increase of the score / 100. Both are multiplied by env_reward_weight, which is 0 by default.",
    )


@dataclass(slots=True)
class _Episode:
    """A running episode: its task, seed and options, and what has happened so far."""

    task_id: str
    task_type: str
    seed: int
    world: World | None  # `None` in a copy that has not been stepped
    seen: Seen  # the state after the last action
    engine_limit: int | None
    with_key: bool
    actions: tuple[str, ...] = ()
    listed: tuple[str, ...] | None = None  # valid actions, if they are listed


class ScienceWorldEnv(AsyncTextEnv):
    """A ScienceWorld environment that plays any task of its suite.

    The environment has no turn limit: the engine has none, only its Python wrapper has. An episode terminates with
    the task done (score 100, `won`) or failed (score -100). It is truncated only if `reset` gets an `engine_limit`, by
    the step after which more ticks have passed; with 100 that is when the stock wrapper reports "done".

    The reward of a step is the increase of the score, divided by 100; on failure it is `EngineRules.failure_reward`.

    Besides the required keys, `info` holds `accepted` (whether the engine knew the action), `score` (0 to 100, or
    -100), `failed`, `moves` (ticks so far), `objects` (tuple of the objects in reach), `look` and `inventory` (texts),
    `action_templates` (tuple) and `task_id`. `admissible_actions` is `None` unless `EngineRules.list_actions` is set.
    """

    is_deterministic = True  # the seed and the number of inputs decide what is random

    def __init__(self, host: Host, rules: EngineRules) -> None:
        self._host, self._rules = host, rules
        self._episode: _Episode | None = None
        self._take_seat()

    def _take_seat(self) -> None:
        self._seat: int | None = self._host.take_seat()
        self._forget = weakref.finalize(self, self._host.forget_seat, self._seat)

    def copy(self) -> Self:
        """Returns an independent environment in the same state, which takes a seat and a world with its first use.

        The engine cannot copy a world. A copy plays the episode again in a new one, by the same seed: a load and all
        actions so far. Random events after the copy are those of the original, as in all training episodes of a run.

        Raises:
            EnvError: By the copy's first `step`, if the repeated actions lead to another state.
        """
        twin = copy(self)
        twin._seat = twin._pending = None
        twin._episode = self._episode and replace(self._episode, world=None)
        return twin

    def reset_async(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Starts a reset; `reset_wait` returns the first observation and info.

        Args:
            seed: Seed of the random events after the start; 0 if `None`. The start depends only on the variation.
            options: `task_id`; `engine_limit`, the ticks after which the episode is truncated (no limit by default);
                `simplification`, which must be the suite's; `state_key`, whether `info` holds `Seen.key`.

        Raises:
            EnvError: If an option is invalid, or the JVM cannot start, died or hung.
        """
        task_id, engine_limit = self._read(options or {})
        with_key = bool((options or {}).get("state_key"))
        self._episode, seat = None, self._own_seat()

        def begin() -> tuple[str, Info]:
            self._episode = episode = self._begin(seat, task_id, seed or 0, engine_limit, with_key)
            return episode.seen.observation, self._info(episode)

        self._pending = self._host.submit(begin)

    def step_async(self, action: str) -> None:
        """Starts a step; `step_wait` returns its result. Case and white space of the action are ignored.

        Raises:
            EnvError: If there was no reset; `step_wait` if the JVM died or hung. The next reset starts another.
        """
        episode = self._episode
        if episode is None:
            raise EnvError(NOT_RUNNING)
        text = " ".join(action.lower().split())
        seat = self._own_seat()
        self._pending = self._host.submit(lambda: self._go_on(episode, text, seat))

    def close(self) -> None:
        """Frees the world and, with the last one of a JVM, stops that JVM. May be called twice."""
        self._episode = self._pending = None
        if self._seat is not None and self._forget.detach():
            self._host.free_seat(self._seat)
        self._seat = None

    def _own_seat(self) -> int:
        if self._seat is None:
            self._take_seat()
        assert self._seat is not None
        return self._seat

    def _read(self, options: dict[str, Any]) -> tuple[str, int | None]:
        task_id, limit = str(options.get("task_id")), options.get("engine_limit")
        find_task(task_id)
        wanted = options.get("simplification", self._rules.simplification)
        if wanted != self._rules.simplification:
            raise EnvError(
                f"simplification: expected {self._rules.simplification!r}, which all worlds on the suite's JVMs share, "
                f"got {wanted!r}; change the protocol, or the suite's simplification"
            )
        return task_id, limit

    # --- On the thread of the JVM --------------------------------------------------------------------------------

    def _begin(self, seat: int, task_id: str, seed: int, limit: int | None, with_key: bool) -> _Episode:
        task_type, variation = find_task(task_id)
        world = self._host.world(seat)
        seen = world.load(task_type, variation, self._rules.simplification, seed=seed)
        episode = _Episode(task_id, task_type, seed, world, seen, limit, with_key)
        self._list(episode)
        return episode

    def _go_on(self, episode: _Episode, text: str, seat: int) -> tuple[str, float, bool, bool, Info]:
        if episode.world is None:
            self._play_again(episode, seat)
        before = episode.seen.score
        self._act(episode, text)
        seen = episode.seen
        terminated = seen.completed or seen.score < 0
        truncated = episode.engine_limit is not None and seen.moves > episode.engine_limit and not terminated
        return seen.observation, self._reward(before, seen.score), terminated, truncated, self._info(episode)

    def _act(self, episode: _Episode, text: str) -> None:
        world = episode.world
        assert world is not None
        if episode.seen.choices and text not in episode.seen.choices:
            world.cancel()
        seen = world.step(text)
        if seen.choices and self._rules.ambiguity == "first":
            seen = world.step(min(seen.choices, key=lambda number: (seen.choices[number], int(number))))
        episode.seen, episode.actions = seen, (*episode.actions, text)
        self._list(episode)

    def _play_again(self, episode: _Episode, seat: int) -> None:
        """Plays the actions of a copied episode in the world of a seat; `EnvError` if they lead to another state."""
        again = self._begin(seat, episode.task_id, episode.seed, episode.engine_limit, episode.with_key)
        for action in episode.actions:
            self._act(again, action)
        if again.seen != episode.seen:
            raise EnvError(
                f"copy: expected the {len(episode.actions)} actions of {episode.task_id} to lead to the same state "
                f"again, got {again.seen.observation!r} instead of {episode.seen.observation!r}; leave its type out"
            )
        episode.world = again.world

    def _reward(self, before: int, after: int) -> float:
        if after < 0:
            return self._rules.failure_reward if before >= 0 else 0.0
        return (after - before) / 100

    def _list(self, episode: _Episode) -> None:
        if not self._rules.list_actions:
            return
        if not episode.seen.choices:
            assert episode.world is not None
            episode.listed = episode.world.valid_actions()
        else:  # an ambiguous request changes nothing, so the actions of before are still valid
            known = [action for action in episode.listed or () if not action.isdecimal()]
            episode.listed = (*episode.seen.choices, *known)

    def _info(self, episode: _Episode) -> Info:
        seen, world = episode.seen, episode.world
        assert world is not None
        return {
            "admissible_actions": episode.listed,
            "accepted": seen.is_known,
            "won": seen.completed and seen.score == 100,
            "failed": seen.score < 0,
            "task": world.task,
            "task_type": episode.task_type,
            "task_id": episode.task_id,
            "score": seen.score,
            "moves": seen.moves,
            "objects": seen.objects,
            "look": seen.look,
            "inventory": seen.inventory,
            "action_templates": world.action_templates,
            **({"state_key": seen.key} if episode.with_key else {}),
        }
