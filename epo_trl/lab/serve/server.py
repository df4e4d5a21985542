"""Task suites as OpenEnv servers.

Each WebSocket session plays its own environment of the suite. One thread makes all calls to the environments, since
engines of this package share state between the environments of a process; the event loop makes them where they are too
short to wait for.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
from pydantic import Field

from epo_trl import __version__
from epo_trl.envs.base import EnvError, TaskSuite, TextEnv
from epo_trl.envs.border import ends_episode_alone, error_text
from epo_trl.envs.numbered import FIRST_SEED
from epo_trl.rollout.running_episode import RunningEpisode
from epo_trl.rollout.spec import RolloutSettings
from epo_trl.types import StopReason

TASK_OPTIONS = ("task_id", "split", "index")
_CLOSED = "session: expected an open one, got one that was closed after its idle timeout; connect again"


class TextAction(Action):
    """An action."""

    message: str = Field(max_length=100_000, description="The action.")


class TextObservation(Observation):
    """The environment's answer."""

    text: str = Field(description="What the agent sees.")
    task: str = Field(description="Description of the task.")
    task_type: str = Field(description="Kind of task.")
    admissible_actions: list[str] | None = Field(description="Actions that the engine accepts now, if listed.")
    accepted: bool = Field(description="Whether the last action was valid.")
    is_success: bool = Field(description="Whether the task is solved.")
    score: int | float | None = Field(default=None, description="The environment's own score, if it keeps one.")
    truncated: bool = Field(default=False, description="Whether a limit has ended the episode.")
    turn: int = Field(description="Number of actions taken.")


@dataclass
class ServedGames:
    """What all sessions of a server share."""

    suite: TaskSuite
    protocol: str = ""  # whose rules hold
    max_turns: int | None = None  # `None` for no limit but the environment's own
    env_options: Mapping[str, Any] = field(default_factory=dict)
    call_timeout_seconds: float = 60.0  # with the wait for the other sessions' calls; not for suites that are `instant`

    def __post_init__(self) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="games")
        self.settings = RolloutSettings(max_turns=self.max_turns or sys.maxsize, env_options=self.env_options)
        self.verbatim = self.suite.verbatim or bool(self.suite.tools)
        self.tasks = {split: self.suite.task_ids(split) for split in self.suite.splits}

    async def call(self, function: Callable[[], Any]) -> Any:
        """Calls a function in the thread of the environments, or at once if the suite is `instant`.

        A call that fails or takes too long is an `EnvError`.
        """
        if self.suite.instant:
            return _contained(function)
        running = asyncio.get_running_loop().run_in_executor(self.thread, _contained, function)
        try:
            return await asyncio.wait_for(running, self.call_timeout_seconds)
        except TimeoutError as error:
            raise EnvError(f"call_timeout: no answer of the environment in {self.call_timeout_seconds} s") from error

    def all_ended(self, timeout_seconds: float) -> bool:
        """Waits for the calls of the environments so far and returns whether all have ended in time."""
        try:
            self.thread.submit(lambda: None).result(timeout_seconds)
        except TimeoutError:
            return False
        return True

    def choose_task(self, seed: int | None, task: Mapping[str, Any]) -> str:
        """Returns the id of the task that a reset asks for, or raises `EnvError` or `IndexError` if there is none.

        Args:
            seed: Number of a task of "train", or of "iid" from 1,000,000, as in the adapter for OpenEnv servers. Counts
                from the start again beyond the end of the list. Without a seed the number is random.
            task: `task_id`, or `split` (then the number is one of this list) and `index`. It may repeat options of the
                server's protocol, as a client does that evaluates by the same one.
        """
        for name, value in task.items():
            if name not in TASK_OPTIONS and (name not in self.env_options or value != self.env_options[name]):
                allowed = [*TASK_OPTIONS, *(f"{key}={rule!r}" for key, rule in self.env_options.items())]
                raise EnvError(f"reset: expected seed, episode_id, {', '.join(allowed)}, got {name}={value!r:.100}")
        if "task_id" in task:
            return str(task["task_id"])
        number = random.randrange(FIRST_SEED["iid"]) if seed is None else seed
        split = task.get("split", "iid" if number >= FIRST_SEED["iid"] else self.suite.splits[0])
        self.suite.check_split(split)
        ids = self.tasks[split]
        return ids[task.get("index", number % FIRST_SEED["iid"] % len(ids))]


class GameSession(Environment):
    """One session: an environment of the server."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    reset = step = None  # OpenEnv calls the asynchronous methods

    def __init__(self, games: ServedGames) -> None:
        super().__init__()
        self._games = games
        self._env: TextEnv | None = None
        self._episode: RunningEpisode | None = None
        self._running = self._closed = False  # a call that fails, or ends too late, leaves no running episode
        self._episode_id: str | None = None

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **task: Any) -> TextObservation:
        """Starts an episode of the task that the options choose and returns its first observation."""
        self._running, games = False, self._games
        self._episode = await games.call(partial(self._start, games.choose_task(seed, task), seed or 0))
        self._running, self._episode_id = True, episode_id
        rules = {"suite": games.suite.name, "protocol": games.protocol, "max_turns": games.max_turns}
        tools = {"tools": list(self._episode.info["tools"])} if "tools" in self._episode.info else {}
        return self._seen(self._episode, accepted=True, metadata=rules | tools)

    def _start(self, task_id: str, seed: int) -> RunningEpisode:
        if self._closed:
            raise EnvError(_CLOSED)
        if self._env is None:
            self._env = self._games.suite.make_env()
        episode = RunningEpisode(task_id, seed, self._env, self._games.settings)
        episode.start()
        return episode

    async def step_async(self, action: TextAction, timeout_s: float | None = None, **rest: Any) -> TextObservation:
        """Performs an action and returns the observation after it."""
        if self._closed:
            raise EnvError(_CLOSED)
        if self._episode is None or not self._running:
            raise EnvError("step: expected a running episode, got none; call reset first")
        self._running, episode = False, self._episode
        turn = await self._games.call(partial(episode.act, action.message, verbatim=self._games.verbatim))
        self._running = episode.stop is None
        truncated = episode.stop in (StopReason.TRUNCATED, StopReason.TURN_LIMIT)
        return self._seen(
            episode, accepted=turn.is_valid, reward=turn.env_reward, done=not self._running, truncated=truncated
        )

    def _seen(self, episode: RunningEpisode, **rest: Any) -> TextObservation:
        info = episode.info
        listed = info["admissible_actions"]
        return TextObservation(
            text=episode.observation,
            task=info["task"],
            task_type=info["task_type"],
            admissible_actions=None if listed is None else list(listed),
            is_success=bool(info["won"]),
            score=info.get("score"),
            turn=len(episode.turns),
            **rest,
        )

    @property
    def state(self) -> State:
        """The state of the episode."""
        episode = self._episode
        return State(
            episode_id=self._episode_id,
            step_count=len(episode.turns) if episode else 0,
            task_id=episode.task_id if episode else "",
            running=self._running and not self._closed,
            is_success=bool(episode and episode.info["won"]),
        )

    def get_metadata(self) -> EnvironmentMetadata:
        """Returns name, description with the rules, and version."""
        games, suite = self._games, self._games.suite
        about = (inspect.getdoc(suite) or suite.name).splitlines()[0]
        limit = f"ends after {games.max_turns} turns" if games.max_turns else "has no turn limit but its own"
        rules = f"Protocol {games.protocol or 'none'}: an episode {limit}; an invalid action is a turn."
        return EnvironmentMetadata(name=suite.name, description=f"{about} {rules}", version=__version__)

    def list_splits(self) -> list[dict[str, str]]:
        """Returns the task lists: "train", and tests."""
        return [{"name": name, "type": "test" if index else "train"} for index, name in enumerate(self._games.tasks)]

    def num_tasks(self, split: str) -> int:
        """Returns the number of tasks of a list."""
        return len(self._games.tasks[split])

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Returns one task. Raises `IndexError` if there is none at the index."""
        return {"id": self._games.tasks[split][index], "split": split, "index": index}

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """Returns a slice of a list."""
        return [self.get_task(split, index) for index in range(self.num_tasks(split))[start:stop]]

    list_tasks = get_task_range

    def close(self) -> None:
        """Frees the environment. May be called twice."""
        self._closed = True
        if self._env is not None:
            with suppress(RuntimeError):  # the interpreter is ending
                self._games.thread.submit(self._env.close)  # after the calls so far


def _contained(function: Callable[[], Any]) -> Any:
    """Calls an environment. Its exceptions become `EnvError`: a future cannot hold all, nor does OpenEnv catch all."""
    try:
        return function()
    except EnvError:
        raise
    except BaseException as error:
        if not ends_episode_alone(error):
            raise
        raise EnvError(error_text(error)) from error
