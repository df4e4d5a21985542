"""Plays a served game in many sessions for some minutes while clients are killed and send nonsense.

    python benchmarks/stress_serve.py --minutes 10

Exits with 1 if an answer is wrong, a killed client's seat is not free after 10 seconds, or the server's memory grows by
more than 5 % after the first quarter of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import time
from collections import Counter

import psutil
import websockets
from openenv.core import GenericEnvClient
from server_process import served

GAMES = 200
HELD = 8  # sessions of the client that is killed
SPARE = 3  # seats for nonsense, whose last session may not have ended when the next begins
BAD = {
    "no json": "INVALID_JSON",
    '{"type": "fly"}': "UNKNOWN_TYPE",
    '{"type": "step", "data": {"message": 3}}': "VALIDATION_ERROR",
    '{"type": "step", "data": {"message": "look"}}': "EXECUTION_ERROR",  # before a reset
    '{"type": "reset", "data": {"split": "none"}}': "EXECUTION_ERROR",
}


async def open_session(url: str, until: float = float("inf")) -> GenericEnvClient:
    """Returns a client with a session, as soon as there is a seat."""
    while True:
        client = GenericEnvClient(url)
        try:
            await client.reset(split="train", index=0)
            return client
        except RuntimeError as error:
            assert "CAPACITY_REACHED" in str(error) and time.monotonic() < until, error
            await client.close()
            await asyncio.sleep(0.2)


async def play(url: str, seed: int, until: float, counts: Counter[str]) -> None:
    """Plays random admissible actions, with a new session for every tenth episode."""
    rng = random.Random(seed)
    while time.monotonic() < until:
        async with await open_session(url) as client:
            for _ in range(10):
                result = await client.reset(split="train", index=rng.randrange(GAMES))
                while not result.done:
                    if time.monotonic() >= until:
                        return
                    result = await client.step({"message": rng.choice(result.observation["admissible_actions"])})
                    counts["steps"] += 1
                counts["episodes"] += 1


async def send_nonsense(url: str, until: float, counts: Counter[str]) -> None:
    """Sends bad messages, each of which has to get its error."""
    while time.monotonic() < until:
        async with websockets.connect(url.replace("http", "ws") + "/ws") as line:
            for text, code in BAD.items():
                await line.send(text)
                answer = json.loads(await line.recv())
                assert answer["data"].get("code") == code, (text, answer)
                counts["bad messages"] += 1
        await asyncio.sleep(0.5)


def hold(url: str, ready: multiprocessing.synchronize.Event) -> None:
    """Plays in some sessions until it is killed."""

    async def main() -> None:
        counts: Counter[str] = Counter()
        players = [asyncio.create_task(play(url, seed, float("inf"), counts)) for seed in range(HELD)]
        while counts["steps"] < 10 * HELD:
            await asyncio.sleep(0.01)
        ready.set()
        await asyncio.gather(*players)

    asyncio.run(main())


async def kill_clients(url: str, until: float, counts: Counter[str]) -> None:
    """Starts clients that take the last seats and kills them in the middle of their episodes."""
    context = multiprocessing.get_context("spawn")
    while time.monotonic() < until:
        ready = context.Event()
        client = context.Process(target=hold, args=(url, ready), daemon=True)
        client.start()
        in_time = await asyncio.to_thread(ready.wait, 120)
        assert in_time, "the next client got no seats"
        client.kill()
        counts["killed clients"] += 1
        await take_seats(url, HELD)


async def take_seats(url: str, seats: int, seconds: float = 10.0) -> None:
    """Waits until so many seats are free, takes them and leaves them."""
    until = time.monotonic() + seconds
    clients = [await open_session(url, until) for _ in range(seats)]
    await asyncio.gather(*(client.close() for client in clients))


async def watch(process: psutil.Process, until: float, memory: list[float]) -> None:
    """Notes the memory of the server in MB, once a second."""
    while time.monotonic() < until:
        memory.append(process.memory_info().rss / 2**20)
        await asyncio.sleep(1)


async def stress(url: str, pid: int, minutes: float, sessions: int) -> bool:
    """Runs all clients, prints what they did and returns whether the memory is flat."""
    counts: Counter[str] = Counter()
    memory: list[float] = []
    start = time.monotonic()
    until = start + 60 * minutes
    await asyncio.gather(
        *(play(url, seed, until, counts) for seed in range(sessions)),
        send_nonsense(url, until, counts),
        kill_clients(url, until, counts),
        watch(psutil.Process(pid), until, memory),
    )
    seconds = time.monotonic() - start
    await take_seats(url, sessions + HELD + SPARE)  # all are free again
    settled = memory[len(memory) // 4 :]
    growth = max(settled) / settled[0] - 1
    print(", ".join(f"{count:,} {name}" for name, count in counts.items()))
    print(f"{counts['steps'] / seconds:,.0f} steps/s in {sessions} sessions for {seconds:.0f} s")
    print(f"memory {memory[0]:.0f} MB at the start, {settled[0]:.0f} MB after a quarter, then at most {growth:+.1%}")
    return growth <= 0.05


def main() -> None:
    """Starts the server and the clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--sessions", type=int, default=64)
    given = parser.parse_args()
    seats = str(given.sessions + HELD + SPARE)
    with served("alfworld", "--games", "generated", "--n_train", str(GAMES), "--seats", seats) as (url, pid):
        flat = asyncio.run(stress(url, pid, given.minutes, given.sessions))
    raise SystemExit(0 if flat else 1)


if __name__ == "__main__":
    main()
