"""OpenEnv environments: servers that are reached through OpenEnv's client, `openenv.core.GenericEnvClient`.

Each environment has its own session. Requests of all sessions are in flight together: a server's latency per step is
paid once per turn, not once per episode.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Self

from epo_trl.bounds import Positive, option, read_mapping
from epo_trl.envs.base import AsyncTextEnv, EnvError, Info, submit
from epo_trl.envs.border import flag
from epo_trl.envs.numbered import NO_ACTION, NumberedArguments, NumberedEnv, shown

# Endings of a server's error for an action that it cannot read or rejects, or that its environment rejects.
_REFUSALS = ("(code: INVALID_JSON)", "(code: VALIDATION_ERROR)", "(code: EXECUTION_ERROR)")


class OpenEnv(AsyncTextEnv, NumberedEnv):
    """One session of a server."""

    given: OpenEnvArguments

    def __init__(self, given: OpenEnvArguments) -> None:
        super().__init__(given)
        self._client: Any = None
        self._socket: Any = None  # connection of the episode
        self._state: Mapping[str, Any] = {}

    def reset_async(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Requests the first observation of a task. The server's seed is the task's number; `seed` is not used."""
        number, rest = self._seed(options)
        self._send(self._reset({**read_mapping("reset_kwargs", self.given.reset_kwargs), **rest, "seed": number}))

    def reset_wait(self) -> tuple[str, Info]:
        """Returns the result of `reset_async`."""
        result = self._requested()
        self._socket = self._client._ws
        self._state = _mapping(result.observation)
        return self._text(), self._begin(self._state)

    def step_async(self, action: str) -> None:
        """Sends an action."""
        self._check_running()
        self._send(self._step(action))

    def step_wait(self) -> tuple[str, float, bool, bool, Info]:
        """Returns the server's response. An action that the server rejects changes nothing."""
        result = self._requested()
        if isinstance(result, str):
            info = self._info(self._state, accepted=False, over=False, refusal=result)
            return f"{NO_ACTION} {result}", 0.0, False, False, info
        self._state = _mapping(result.observation)
        done, truncated = flag("done", result.done), flag("truncated", self._state.get("truncated", False))
        ends = {"terminated": done and not truncated, "truncated": done and truncated}
        return self._text(), *self._go_on(self._state, float(result.reward or 0.0), **ends)

    def close(self) -> None:
        """Ends the session, which frees its place on the server. Waits for the server; may be called twice."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel()
        elif self._client is None:
            return
        try:
            submit(self._close()).result(self.given.timeout_seconds)
        except Exception as error:  # the server may be gone
            warnings.warn(f"base_url: {self.given.base_url}: a session was not closed: {error!r}", stacklevel=2)

    def _send(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        if self._pending is not None:  # never waited for; the session answers in order
            with contextlib.suppress(EnvError):
                self._requested()
        self._pending = submit(coroutine)

    def _requested(self) -> Any:
        try:
            return super()._requested()
        except Exception as error:
            self._running = False
            self.close()  # a late answer would be taken for that of the next request
            advice = "; give the server a larger max_concurrent_envs" if "CAPACITY_REACHED" in str(error) else ""
            reason = str(error) or type(error).__name__
            raise EnvError(f"base_url: {self.given.base_url}: {reason}{advice}") from error

    async def _reset(self, options: dict[str, Any]) -> Any:
        if self._client is not None:
            try:
                return await self._client.reset(**options)
            except RuntimeError:  # the server may have ended a session that was idle for long
                await self._close()
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(self.given.base_url, message_timeout_s=self.given.timeout_seconds)
        await self._client.connect()
        return await self._client.reset(**options)

    async def _close(self) -> None:
        """Closes the client in the loop in which it was opened; outside a loop, its methods return no awaitable."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _step(self, action: str) -> Any:
        """Returns the result of a step, or the reason why the action is rejected."""
        try:
            payload = {self.given.action_key: action} if self.given.action_key else json.loads(action)
        except ValueError:
            payload = None
        if not isinstance(payload, dict):
            return "an action is a JSON object here"
        try:
            result = await self._client.step(payload)
        except RuntimeError as error:
            if not str(error).endswith(_REFUSALS):
                raise
            state = await self._client.state()
            if not _mapping(state).get("running", True):  # a game of `epo-trl serve` has failed
                raise
            result = str(error)
        if self._client._ws is not self._socket:  # the client has connected again, to a session without this episode
            raise ConnectionError("the connection was lost, and the episode with it")
        return result

    def _text(self) -> str:
        found: Any = self._state
        key = self.given.observation_key
        try:
            for part in filter(None, key.split(".")):
                found = found[int(part)] if isinstance(found, list) else found[part]
        except (LookupError, TypeError, ValueError) as error:
            raise EnvError(f"observation_key: expected a key of {str(self._state)[:200]}, got {key!r}") from error
        return shown(found if isinstance(found, str) else json.dumps(found, ensure_ascii=False))


@dataclass(eq=False)
class OpenEnvArguments(NumberedArguments):
    """An environment on an OpenEnv server."""

    MAY_CHANGE: ClassVar[frozenset[str]] = NumberedArguments.MAY_CHANGE | {"base_url", "timeout_seconds"}

    base_url: str = option("http://localhost:8000", "URL of the server.")
    suite_name: str = option("openenv", "Name of the suite in reports.")
    action_key: str = option("message", "Field of the action that holds the text; empty: the text is JSON.")
    observation_key: str = option(
        "", "Path of the text in the observation, such as 'messages.-1.content'; empty: all, as JSON."
    )
    reset_kwargs: dict[str, Any] | str | None = option(
        None, "Arguments for `reset` besides the seed, such as '{\"difficulty\": 2}'."
    )
    timeout_seconds: Positive = option(60.0, "Time limit of a request, in seconds.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.name, self.reset_kwargs = self.suite_name, read_mapping("reset_kwargs", self.reset_kwargs)

    def make_suite(self) -> Self:
        """Returns the suite, if openenv is installed."""
        if find_spec("openenv") is None:  # importing it takes seconds
            raise EnvError("environment: 'openenv' needs the package openenv; pip install 'epo-trl[openenv]'")
        return self

    def make_env(self) -> OpenEnv:
        """Creates a fresh environment; its session begins with the first reset."""
        return OpenEnv(self)


def _mapping(state: Any) -> Mapping[str, Any]:
    return state if isinstance(state, Mapping) else {"observation": state}
