"""`epo-trl serve`: OpenEnv's own client, our adapter and TRL's trainer play its games."""

import asyncio
import json
import re
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("openenv")

import forked
import server_process
import websockets
from datasets import Dataset
from processes import assert_soon
from tool_worlds import chat_tokenizer, scripted_model, train_with_trl, wait_for_seat

from epo_trl.envs import EnvError
from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.envs.openenv import OpenEnvArguments
from epo_trl.envs.scienceworld import ScienceWorldSuite
from epo_trl.envs.testing import EnvContract
from epo_trl.envs.trap import TrapSuite
from epo_trl.lab.serve.command import main

pytestmark = pytest.mark.slow

SEATS = 64
PAGE = Path(__file__).parents[1] / "docs" / "serve.md"
PROMPT = [{"role": "user", "content": "Act."}]
GAMES = "--games generated --n_train 6 --n_iid 2 --n_ood 2".split()
served = partial(server_process.served, start=forked.start_server)


@pytest.fixture(scope="module")
def trap():
    """In a process that imports for itself."""
    with server_process.served("trap", "--hatch", "0", "--seats", "3") as (url, _):
        yield url


@pytest.fixture(scope="module")
def alfworld():
    with served("alfworld", *GAMES, "--seats", str(SEATS)) as (url, _):
        yield url


def client_suite(url, **settings):
    return OpenEnvArguments(base_url=url, observation_key="text", **settings).make_suite()


class TestServedTrap(EnvContract):
    expert_turns = None
    test_another_process_sees_the_same_lists_and_starts = None  # TestColours has it of the same client

    @pytest.fixture(autouse=True)
    def server(self, trap):
        self.url = trap

    def make_suite(self):
        return client_suite(self.url, train_tasks=5, test_tasks=5)


def test_a_served_game_is_the_game_in_the_process(alfworld):
    """Our adapter plays the expert's actions on the server and in the process, in training and in test games."""
    here = GeneratedAlfworld(6, 2, 2)
    there = client_suite(alfworld, train_tasks=6, test_tasks=2)
    for task_id in ("train/0", "train/5", "iid/1"):
        own, other, expert = here.make_env(), there.make_env(), here.make_expert()
        observation, info = own.reset(options={"task_id": task_id})
        seen, told = other.reset(options={"task_id": task_id})
        expert.reset(observation, info)
        done = False
        while not done:
            for name in ("admissible_actions", "won", "task", "task_type"):
                assert told[name] == info[name]
            assert seen == observation
            action = expert.act(observation, info)[1]
            observation, reward, done, _, info = own.step(action)
            seen, *paid, told = other.step(action)
            assert paid == [reward, done, False]
        assert told["won"]
        other.close()


def test_sixty_four_sessions_play_at_once(alfworld):
    """Each plays its own game to the end; one more is refused."""
    from openenv.core import GenericEnvClient

    suite = GeneratedAlfworld(6, 2, 2)

    async def episode(number):
        own, expert = suite.make_env(), suite.make_expert()
        observation, info = own.reset(options={"task_id": f"train/{number % 6}"})
        expert.reset(observation, info)
        async with GenericEnvClient(alfworld, message_timeout_s=120) as client:
            result = await client.reset(task_id=f"train/{number % 6}")
            await asyncio.wait_for(everyone.wait(), 120)
            while not result.done:
                assert result.observation["text"] == observation
                action = expert.act(observation, info)[1]
                observation, *_, info = own.step(action)
                result = await client.step({"message": action})
            return result.observation["is_success"], result.reward

    async def play():
        nonlocal everyone
        everyone = asyncio.Barrier(SEATS)
        return await asyncio.gather(*(episode(number) for number in range(SEATS)))

    everyone = None
    assert asyncio.run(play()) == [(True, 1.0)] * SEATS


def test_bad_messages_are_answered_with_errors_and_harm_nobody(trap):
    async def play():
        async with websockets.connect(trap.replace("http", "ws") + "/ws") as line:

            async def ask(text):
                await line.send(text)
                return json.loads(await line.recv())

            assert (await ask('{"type": "reset", "data": {"seed": 1}}'))["type"] == "observation"
            codes = {
                "no json": "INVALID_JSON",
                json.dumps({"type": "step", "data": {"message": "x" * 100_001}}): "VALIDATION_ERROR",
            }
            for text, code in codes.items():
                assert (await ask(text))["data"]["code"] == code, text
            assert (await ask('{"type": "step", "data": {"message": "sing"}}'))["data"]["observation"]["turn"] == 1
        async with websockets.connect(trap.replace("http", "ws") + "/ws") as line:
            await line.send("x" * (2**20 + 1))
            with pytest.raises(websockets.ConnectionClosed, match="1009"):
                await line.recv()

    asyncio.run(play())


HOLD = """
import asyncio, sys
from openenv.core import GenericEnvClient
async def hold():
    clients = []
    while len(clients) < 3:  # sessions of earlier tests may end only now
        client = GenericEnvClient(sys.argv[1])
        try:
            await client.reset(seed=1)
            clients.append(client)
        except RuntimeError as error:
            assert "CAPACITY_REACHED" in str(error)
            await asyncio.sleep(0.2)
    print("seated", flush=True)
    await asyncio.sleep(600)
asyncio.run(hold())
"""


def test_a_full_server_refuses_and_a_killed_client_frees_its_seats(trap, tmp_path):
    suite = client_suite(trap, train_tasks=5)
    script, log = tmp_path / "hold.py", tmp_path / "log.txt"
    script.write_text(HOLD)
    holder = forked.start([script, trap], cwd=tmp_path, log=log)
    try:
        assert_soon(lambda: log.read_text() == "seated\n", 120)
        with pytest.raises(EnvError, match="CAPACITY_REACHED"):
            suite.make_env().reset(options={"task_id": "train/0"})
    finally:
        holder.kill()
        holder.wait()
    wait_for_seat(suite, 20)


@pytest.mark.games
def test_two_sessions_of_served_scienceworld_play_as_in_the_process():
    """Worlds share a JVM there and here. They play turn by turn, so that a call in another thread would be noticed."""
    from openenv.core import GenericEnvClient

    here = ScienceWorldSuite()
    ids = [here.task_ids("train")[0], here.task_ids("iid")[0]]
    with served("scienceworld") as (url, _), ExitStack() as stack:
        own = [here.make_env() for _ in ids]
        clients = [stack.enter_context(GenericEnvClient(url).sync()) for _ in ids]
        for env, client, task_id in zip(own, clients, ids, strict=True):
            seen, info = env.reset(seed=3, options={"task_id": task_id})
            told = client.reset(task_id=task_id, seed=3).observation
            assert (told["text"], told["task"], told["admissible_actions"]) == (seen, info["task"], None)
        for action in ("look around", "sing", "inventory", "open door to hallway"):
            for env, client in zip(own, clients, strict=True):
                seen, *_, info = env.step(action)
                told = client.step({"message": action}).observation
                assert (told["text"], told["accepted"]) == (seen, info["accepted"])
        for env in own:
            env.close()


def test_an_idle_session_loses_its_seat():
    with served("trap", "--seats", "1", "--idle_timeout", "1") as (url, _):
        suite = client_suite(url, train_tasks=5)
        env = suite.make_env()
        env.reset(options={"task_id": "train/0"})
        wait_for_seat(suite, 60)
        with pytest.raises(EnvError, match="closed after its idle timeout"):
            env.step("red")
        env.close()


def class_of_the_docs(url):
    """Returns the environment that docs/serve.md shows, as a client of this server."""
    from openenv.core import GenericEnvClient

    (block,) = re.findall(r"```python\n.*(class Household:\n.*?)\n\n\nprompt = ", PAGE.read_text(), re.DOTALL)
    names = {"GenericEnvClient": lambda _: GenericEnvClient(url)}
    exec(block, names)
    return names["Household"]


def test_trl_s_trainer_plays_the_served_games(tmp_path):
    """The trap of one room and two doors: one of the two scripted responses takes the right one."""
    call = '<tool_call>\n{{"name": "act", "arguments": {{"action": "{}"}}}}\n</tool_call>'
    suite = TrapSuite(1, doors=2, hatch=0.0)
    env, guide = suite.make_env(), suite.make_expert()
    _, info = env.reset(options={"task_id": "train/0"})
    right = guide.act("", info)[1]
    wrong = next(action for action in info["admissible_actions"] if action != right)
    tokenizer = chat_tokenizer(["You are an agent and act by calling tools", call])
    model = scripted_model(tokenizer, [call.format(right), call.format(wrong)])
    with served("trap", "--rooms", "1", "--doors", "2", "--hatch", "0", "--seats", "8") as (url, _):
        rows = Dataset.from_list([{"prompt": PROMPT, "index": index} for index in range(8)])
        world = class_of_the_docs(url)
        _, logged = train_with_trl(tmp_path, model, tokenizer, 1, train_dataset=rows, environment_factory=world)
    assert [line["reward"] for line in logged] == [0.5, 0.5] and logged[0]["grad_norm"] > 0


def test_a_port_in_use_is_one_error_and_nothing_is_said_to_be_served(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["--environment", "trap", "--port", str(port)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"expected a free port, got 127.0.0.1 and {port}" in err
