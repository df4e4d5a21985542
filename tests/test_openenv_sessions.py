"""Sessions of OpenEnv are given back. Its client is a stand-in here; tests/test_openenv.py has the real one.

Like the client of 0.10, the stand-in's methods return awaitables inside an event loop, and block outside of one: there
`close()` has no result to wait for, and refuses a client that was opened in a loop.
"""

import asyncio
import importlib.machinery
import sys
import types

import pytest

from epo_trl.envs import EnvError
from epo_trl.envs.adapters.openenv import OpenEnvArguments

SEATS = 3


class Server:
    """Gives a seat to each session."""

    def __init__(self):
        self.taken = 0
        self.opened = 0
        self.answer = asyncio.sleep  # how long a reset takes
        self.close_error = None


class Client:
    """What the adapter uses of `openenv.core.GenericEnvClient`."""

    server: Server

    def __init__(self, base_url, message_timeout_s):
        self._loop = None

    def connect(self):
        return self._dispatch(self._connect)

    def reset(self, **options):
        return self._dispatch(self._reset, **options)

    def step(self, action):
        return self._dispatch(self._step, action)

    def close(self):
        return self._dispatch(self._close)

    def _dispatch(self, method, *args, **kwargs):
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            if self._loop is not None:
                raise RuntimeError("this client is in use in a loop") from None
            return asyncio.run(method(*args, **kwargs))
        self._loop = loop
        return method(*args, **kwargs)

    async def _connect(self):
        if self.server.taken >= SEATS:
            raise RuntimeError("Server at capacity (code: CAPACITY_REACHED)")
        self.server.taken += 1
        self.server.opened += 1
        return self

    async def _reset(self, seed):
        await self.server.answer(0)
        return types.SimpleNamespace(observation={"text": f"colour {seed}"}, reward=None, done=False)

    async def _step(self, action):
        return types.SimpleNamespace(observation={"text": "Yes."}, reward=1.0, done=True)

    async def _close(self):
        self.server.taken -= 1
        if self.server.close_error:
            raise self.server.close_error


@pytest.fixture
def server(monkeypatch):
    module, core = types.ModuleType("openenv"), types.ModuleType("openenv.core")
    module.__spec__ = importlib.machinery.ModuleSpec("openenv", None)
    monkeypatch.setitem(sys.modules, "openenv", module)
    monkeypatch.setitem(sys.modules, "openenv.core", core)
    core.GenericEnvClient = Client
    monkeypatch.setattr(Client, "server", Server(), raising=False)
    return Client.server


@pytest.fixture
def suite(server):
    return OpenEnvArguments(observation_key="text", timeout_seconds=5.0).make_suite()


def test_a_hundred_rounds_on_three_seats_leave_no_session(server, suite):
    for _ in range(100):
        envs = [suite.make_env() for _ in range(SEATS)]
        for i, env in enumerate(envs):
            env.reset_async(options={"task_id": f"train/{i}"})
        assert [env.reset_wait()[0] for env in envs] == ["colour 0", "colour 1", "colour 2"]
        assert envs[0].step("red")[4]["won"]
        assert server.taken == SEATS
        for env in envs:
            env.close()
            env.close()
        assert server.taken == 0
    assert server.opened == 100 * SEATS


def test_a_session_ends_that_is_closed_before_its_answer_or_whose_request_has_failed(server, suite):
    async def never(seconds):
        await asyncio.Event().wait()

    async def broken(seconds):
        raise ConnectionError("the line is dead")

    for answer in (never, broken):
        server.answer = answer
        env = suite.make_env()
        env.reset_async(options={"task_id": "train/0"})
        if answer is broken:
            with pytest.raises(EnvError, match="the line is dead"):
                env.reset_wait()
        env.close()
        assert server.taken == 0


def test_a_server_that_is_full_is_named_and_what_is_freed_can_be_taken(server, suite):
    envs = [suite.make_env() for _ in range(SEATS + 1)]
    for env in envs[:SEATS]:
        env.reset(options={"task_id": "train/0"})
    with pytest.raises(EnvError, match="CAPACITY_REACHED.*larger max_concurrent_envs"):
        envs[SEATS].reset(options={"task_id": "train/0"})
    envs[0].close()
    envs[SEATS].reset(options={"task_id": "train/0"})
    for env in envs[1:]:
        env.close()


def test_a_session_that_cannot_be_closed_is_warned_of(server, suite):
    server.close_error = TypeError("an interface has moved")
    env = suite.make_env()
    env.reset(options={"task_id": "train/0"})
    with pytest.warns(UserWarning, match="base_url: http.*not closed: TypeError.*has moved"):
        env.close()
