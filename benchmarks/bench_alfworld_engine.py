"""Speed of the fast ALFWorld engine against TextWorld's, in one run on one core.

python benchmarks/bench_alfworld_engine.py --games 128 --turns 50
"""

import argparse
import random
import time

from epo_trl.envs.alfworld import GeneratedAlfworld


def measure(engine: str, games: int, turns: int) -> tuple[float, float]:
    """Returns seconds per reset and steps per second, all games open at once, with random admissible actions."""
    suite = GeneratedAlfworld(n_train=games, n_iid=0, n_ood=0, engine=engine)
    envs = [suite.make_env() for _ in range(games)]
    rng = random.Random(0)
    start = time.perf_counter()
    infos = [env.reset(options={"task_id": i})[1] for env, i in zip(envs, suite.task_ids("train"), strict=True)]
    reset_seconds = (time.perf_counter() - start) / games
    start = time.perf_counter()
    for _ in range(turns):
        for index, env in enumerate(envs):
            infos[index] = env.step(rng.choice(infos[index]["admissible_actions"]))[-1]
    rate = games * turns / (time.perf_counter() - start)
    for env in envs:
        env.close()
    return reset_seconds, rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=128, help="games open at once, fast engine")
    parser.add_argument("--turns", type=int, default=50, help="turns per game, fast engine")
    parser.add_argument("--stock-games", type=int, default=4, help="games open at once, TextWorld; 0 to leave it out")
    parser.add_argument("--stock-turns", type=int, default=10, help="turns per game, TextWorld")
    args = parser.parse_args()
    reset_seconds, fast = measure("fast", args.games, args.turns)
    print("            games       steps/s    ms to make and reset a game")
    print(f"fast       {args.games:6d} {fast:13,.1f} {reset_seconds * 1000:12.2f}")
    if args.stock_games:
        reset_seconds, stock = measure("textworld", args.stock_games, args.stock_turns)
        print(f"textworld  {args.stock_games:6d} {stock:13,.1f} {reset_seconds * 1000:12.2f}")
        print(f"ratio      {fast / stock:20,.1f}")


if __name__ == "__main__":
    main()
