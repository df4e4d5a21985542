"""Speed of served ALFWorld games against ALFWorld's `AlfredTWEnv` in the process, on generated games.

    python benchmarks/bench_serve.py --turns 50

The server runs in its own process; one client process plays all of its sessions with OpenEnv's client. The actions are
random admissible ones. Resets are not counted.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from functools import partial

from harness import Work, measure, parser, table, write
from server_process import served

from epo_trl.envs.alfworld.generator import write_games

GAMES = 64
STOCK = "AlfredTWEnv, 1 game in the process"


def play_served(url: str, sessions: int, turns: int) -> Work:
    """Builds a benchmark that plays in all sessions at once and returns steps per second."""
    from openenv.core import GenericEnvClient

    async def play() -> float:
        clients = [GenericEnvClient(url) for _ in range(sessions)]
        results = await asyncio.gather(
            *(client.reset(split="train", index=index % GAMES) for index, client in enumerate(clients))
        )
        rng, start = random.Random(0), time.perf_counter()

        async def episode(index: int) -> None:
            result = results[index]
            for _ in range(turns):
                if result.done:
                    result = await clients[index].reset(split="train", index=index % GAMES)
                action = rng.choice(result.observation["admissible_actions"])
                result = await clients[index].step({"message": action})

        await asyncio.gather(*map(episode, range(sessions)))
        seconds = time.perf_counter() - start
        await asyncio.gather(*(client.close() for client in clients))
        return sessions * turns / seconds

    return lambda: asyncio.run(play())


def play_stock(folder: str, turns: int) -> Work:
    """Builds a benchmark that plays one game at a time and returns steps per second."""
    from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv

    config = {
        "env": {"goal_desc_human_anns_prob": 0, "task_types": [1, 2, 3, 4, 5, 6], "domain_randomization": False,
                "expert_type": "handcoded"},
        "dataset": {"data_path": f"{folder}/json_2.1.1/train", "num_train_games": 0},
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": 50}},
    }  # fmt: skip
    env = AlfredTWEnv(config).init_env(batch_size=1)
    rng = random.Random(0)

    def work() -> float:
        _, infos = env.reset()
        start = time.perf_counter()
        for _ in range(turns):
            _, _, _, infos = env.step([rng.choice(infos["admissible_commands"][0])])
        return turns / (time.perf_counter() - start)

    return work


def main() -> None:
    """Benchmarks the server and the stock environment, and prints a table."""
    args = parser(__doc__)
    args.add_argument("--turns", type=int, default=50, help="turns per session")
    args.add_argument("--stock-turns", type=int, default=20, help="turns per round of AlfredTWEnv")
    given = args.parse_args()
    serve = "alfworld", "--games", "generated", "--n_train", str(GAMES), "--max_turns", "1000000", "--seats", "130"
    with tempfile.TemporaryDirectory() as folder, served(*serve) as (url, _):
        write_games(folder, 8, 0, 0)
        measured = measure(
            {
                "served, 1 session": partial(play_served, url, 1, given.turns * 10),
                "served, 64 sessions": partial(play_served, url, 64, given.turns),
                STOCK: partial(play_stock, folder, given.stock_turns),
            },
            given.rounds,
        )
    rates = {name: statistics.median(one.results) for name, one in measured.items()}
    rows = [
        [name, f"{rate:,.1f}", f"{min(measured[name].results):,.1f} to {max(measured[name].results):,.1f}",
         f"{rate / rates[STOCK]:,.1f}x"]
        for name, rate in rates.items()
    ]  # fmt: skip
    print(table(["games", "steps/s", "over the rounds", "ratio"], rows))
    write(given.json, options=vars(given), results=measured)


if __name__ == "__main__":
    main()
