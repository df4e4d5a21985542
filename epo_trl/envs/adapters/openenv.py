"""OpenEnv's environments: servers that are reached through its client, `openenv.core.GenericEnvClient`.

Each environment of ours is a session of its own. Requests of all sessions are under way together: what a server needs
for a step passes once a turn, not once an episode.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from epo_trl.envs.adapters.loop import submit
from epo_trl.envs.adapters.numbered import NO_ACTION, NumberedArguments, NumberedEnv, NumberedSuite
from epo_trl.envs.base import EnvError, Info

# What a server says of an action that it does not take, or whose environment refuses it.
_REFUSALS = ("(code: VALIDATION_ERROR)", "(code: EXECUTION_ERROR)")


class OpenEnv(NumberedEnv):
    """Plays one session of a server.

    Args:
        given: The settings.
        name: Of the suite.
    """

    given: OpenEnvArguments

    def __init__(self, given: OpenEnvArguments, name: str) -> None:
        super().__init__(given, name)
        self._client: Any = None
        self._pending: Future[Any] | None = None
        self._said: Mapping[str, Any] = {}

    def reset_async(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Asks for the first observation of a task. Its number is the seed that the server gets; `seed` is not used."""
        number, rest = self._seed(options)
        self._send(self._reset({**self.given.reset_options(), **rest, "seed": number}))

    def reset_wait(self) -> tuple[str, Info]:
        """Returns it."""
        result = self._wait()
        self._said = _mapping(result.observation)
        return self._text(), self._begin(self._said)

    def step_async(self, action: str) -> None:
        """Sends an action."""
        self._check_running()
        self._send(self._step(action))

    def step_wait(self) -> tuple[str, float, bool, bool, Info]:
        """Returns what the server says to it. An action that it refuses changes nothing."""
        result = self._wait()
        if isinstance(result, str):
            info = self._info(self._said, accepted=False, over=False, refusal=result)
            return f"{NO_ACTION} {result}", 0.0, False, False, info
        self._said = _mapping(result.observation)
        reward, done = float(result.reward or 0.0), bool(result.done)
        return self._text(), reward, done, False, self._go_on(self._said, reward, terminated=done, truncated=False)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Returns the first observation of a task."""
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Returns what the server says to an action."""
        self.step_async(action)
        return self.step_wait()

    def close(self) -> None:
        """Ends the session, so that the server gives its seat to another. Waits for the server; may be called twice."""
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
        before, self._pending = self._pending, None
        if before is not None:  # nobody waited for it; the session answers in order
            with contextlib.suppress(Exception):
                before.result()
        self._pending = submit(coroutine)

    def _wait(self) -> Any:
        pending, self._pending = self._pending, None
        if pending is None:
            raise EnvError("nothing to wait for; call reset_async or step_async first")
        try:
            return pending.result()
        except Exception as error:
            self._running = False
            self.close()  # an answer that comes too late would be taken for the next one's
            advice = "; give the server a larger max_concurrent_envs" if "CAPACITY_REACHED" in str(error) else ""
            reason = str(error) or type(error).__name__
            raise EnvError(f"base_url: {self.given.base_url}: {reason}{advice}") from error

    async def _reset(self, options: dict[str, Any]) -> Any:
        if self._client is None:
            from openenv.core import GenericEnvClient

            self._client = GenericEnvClient(self.given.base_url, message_timeout_s=self.given.timeout_seconds)
            await self._client.connect()
        return await self._client.reset(**options)

    async def _close(self) -> None:
        """Closes the client in the loop in which it was opened: outside of one, its methods return no awaitable."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _step(self, action: str) -> Any:
        """Returns the result of a step, or why the action is refused."""
        payload = self._payload(action)
        if payload is None:
            return "an action is a JSON object here"
        try:
            return await self._client.step(payload)
        except RuntimeError as error:
            if str(error).endswith(_REFUSALS):
                return str(error)
            raise

    def _payload(self, action: str) -> dict[str, Any] | None:
        if self.given.action_key:
            return {self.given.action_key: action}
        try:
            payload = json.loads(action)
        except (ValueError, RecursionError):
            return None
        return payload if isinstance(payload, dict) else None

    def _text(self) -> str:
        found: Any = self._said
        for part in filter(None, self.given.observation_key.split(".")):
            try:
                found = found[int(part)] if isinstance(found, list) else found[part]
            except (LookupError, TypeError, ValueError) as error:
                raise EnvError(
                    f"observation_key: got {self.given.observation_key!r}, but the server said {str(self._said)[:200]}"
                ) from error
        text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
        return text if text.strip() else "(nothing)"


class OpenEnvSuite(NumberedSuite):
    """Seeds of a server.

    Args:
        given: The settings.
    """

    given: OpenEnvArguments

    def __init__(self, given: OpenEnvArguments) -> None:
        super().__init__(given, given.suite_name)
        given.reset_options()
        if find_spec("openenv") is None:  # importing it takes seconds
            raise EnvError("environment: 'openenv' needs the package openenv; pip install 'epo-trl[openenv]'")

    def make_env(self) -> OpenEnv:
        """Returns a fresh environment; its session begins with the first reset."""
        return OpenEnv(self.given, self.name)


@dataclass
class OpenEnvArguments(NumberedArguments):
    """An environment behind an OpenEnv server."""

    base_url: str = field(default="http://localhost:8000", metadata={"help": "Of the server."})
    suite_name: str = field(default="openenv", metadata={"help": "What reports call it."})
    action_key: str = field(
        default="message", metadata={"help": "Field of the action that takes the text; empty: the text is JSON."}
    )
    observation_key: str = field(
        default="",
        metadata={"help": "Where in the observation the text is, as in 'messages.-1.content'; empty: all, as JSON."},
    )
    reset_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "For `reset`, beside the seed, such as '{\"difficulty\": 2}'."}
    )
    timeout_seconds: float = field(default=60.0, metadata={"help": "A server that takes longer has failed."})

    def make_suite(self) -> OpenEnvSuite:
        """Returns the task suite.

        Raises:
            EnvError: If openenv is not installed, or a setting is wrong.
        """
        return OpenEnvSuite(self)

    def reset_options(self) -> dict[str, Any]:
        """Returns `reset_kwargs` as a mapping."""
        given = self.reset_kwargs or {}
        try:
            options = json.loads(given) if isinstance(given, str) else given
        except ValueError as error:
            raise EnvError(f"reset_kwargs: got {given!r}, takes a mapping or its JSON") from error
        if not isinstance(options, dict):
            raise EnvError(f"reset_kwargs: got {given!r}, takes a mapping or its JSON")
        return options


def _mapping(said: Any) -> Mapping[str, Any]:
    return said if isinstance(said, Mapping) else {"observation": said}
