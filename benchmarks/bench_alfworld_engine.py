"""Speed of the fast ALFWorld engine against TextWorld's, on one core.

    python benchmarks/bench_alfworld_engine.py --games 128 --turns 50
    python benchmarks/bench_alfworld_engine.py --data $ALFWORLD_DATA     # on the real games

All games of an engine are open at once; the actions are random admissible ones. From a data folder, both engines play
an even sample of `valid_unseen`.
"""

from __future__ import annotations

import random
import time
from functools import partial

from harness import Work, measure, parser, table, write

from epo_trl.envs.alfworld import AlfworldData, GeneratedAlfworld


def make(engine: str, games: int, turns: int, data: str | None) -> Work:
    """Builds a benchmark that plays all games and returns steps per second and ms to make and reset a game."""

    def work() -> tuple[float, float]:
        suite = AlfworldData(data, engine=engine) if data else GeneratedAlfworld(0, 0, games, engine=engine)
        ids = suite.task_ids("ood")
        ids = [ids[place * len(ids) // games] for place in range(games)]
        rng, start = random.Random(0), time.perf_counter()
        envs = [suite.make_env() for _ in ids]
        infos = [env.reset(options={"task_id": task_id})[1] for env, task_id in zip(envs, ids, strict=True)]
        ready = time.perf_counter()
        for _ in range(turns):
            for index, env in enumerate(envs):
                infos[index] = env.step(rng.choice(infos[index]["admissible_actions"]))[-1]
        end = time.perf_counter()
        for env in envs:
            env.close()
        return games * turns / (end - ready), (ready - start) / games * 1000

    return work


def main() -> None:
    """Benchmarks both engines and prints a table."""
    args = parser(__doc__)
    args.add_argument("--games", type=int, default=128, help="games open at once, fast engine")
    args.add_argument("--turns", type=int, default=50, help="turns per game, fast engine")
    args.add_argument("--stock-games", type=int, default=4, help="games open at once, TextWorld")
    args.add_argument("--stock-turns", type=int, default=10, help="turns per game, TextWorld")
    args.add_argument("--data", help="folder of games, for example $ALFWORLD_DATA; generated games by default")
    given = args.parse_args()
    measured = measure(
        {
            "fast": partial(make, "fast", given.games, given.turns, given.data),
            "textworld": partial(make, "textworld", given.stock_games, given.stock_turns, given.data),
        },
        given.rounds,
    )
    rates = {name: sorted(rate for rate, _ in one.results) for name, one in measured.items()}
    base = rates["textworld"][given.rounds // 2]
    rows = [
        [
            name, given.games if name == "fast" else given.stock_games, f"{rate[given.rounds // 2]:,.1f}",
            f"{rate[0]:,.1f} to {rate[-1]:,.1f}", f"{rate[given.rounds // 2] / base:,.0f}x",
            f"{measured[name].results[-1][1]:.2f}",
        ]
        for name, rate in rates.items()
    ]  # fmt: skip
    print(table(["engine", "games", "steps/s", "over the rounds", "ratio", "ms to make and reset a game"], rows))
    write(given.json, options=vars(given), results=measured)


if __name__ == "__main__":
    main()
