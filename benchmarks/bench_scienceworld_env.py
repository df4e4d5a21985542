"""Speed and memory of many ScienceWorld worlds: shared JVMs against one stock `ScienceWorldEnv` process per world.

python benchmarks/bench_scienceworld_env.py --worlds 8 32 64 --turns 20 --task-types 8

Both play the same actions twice, the second time timed: gold paths, and a `look around` after their end. The stock
worlds are processes with a JVM each; all get their action before the first answer is awaited, as in the authors'
release and similar trainers. Memory is the proportional set size of all processes, Java and Python, with all worlds
loaded and played.
"""

import argparse
import multiprocessing
import time
from pathlib import Path

import psutil

from epo_trl.envs.scienceworld import ScienceWorldSuite
from epo_trl.envs.scienceworld.tasks import all_task_types

RESET = ""  # in place of an action


def memory_mb() -> float:
    """Returns the proportional set size of this process and its descendants, in MB."""
    me = psutil.Process()
    return sum(process.memory_full_info().pss for process in [me, *me.children(recursive=True)]) / 2**20


def play_stock(pipe, task_type: str, variation: int) -> None:
    """Serves one stock environment."""
    from scienceworld import ScienceWorldEnv

    env = ScienceWorldEnv("", None, envStepLimit=10**6)
    env.load(task_type, variation, "easy")
    pipe.send(env.reset()[0])
    while (action := pipe.recv()) is not None:
        pipe.send((env.reset() if action == RESET else env.step(action))[0])
    env.close()


def measure_stock(tasks, actions) -> tuple[float, float, float]:
    """Returns seconds to start, turns of all worlds per second, and MB."""
    before = memory_mb()
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    pipes = []
    for task in tasks:
        mine, theirs = context.Pipe()
        context.Process(target=play_stock, args=(theirs, *task), daemon=True).start()
        pipes.append(mine)
    for pipe in pipes:
        pipe.recv()
    started = time.perf_counter() - start

    def play(turns) -> None:
        for turn in turns:
            for pipe, action in zip(pipes, turn, strict=True):
                pipe.send(action)
            for pipe in pipes:
                pipe.recv()

    turns = list(zip(*actions, strict=True))
    play([*turns, [RESET] * len(pipes)])  # a JVM is slow at first
    start = time.perf_counter()
    play(turns)
    rate = len(tasks) * len(actions[0]) / (time.perf_counter() - start)
    memory = memory_mb() - before
    for pipe in pipes:
        pipe.send(None)
    for process in multiprocessing.active_children():
        process.join()
    return started, rate, memory


def measure_ours(tasks, actions, jvms: int) -> tuple[float, float, float]:
    """Returns seconds to start, turns of all worlds per second, and MB."""
    before = memory_mb()
    start = time.perf_counter()
    suite = ScienceWorldSuite(heldout_types=[], jvms=jvms)
    envs = [suite.make_env() for _ in tasks]

    def reset() -> None:
        for env, (task_type, variation) in zip(envs, tasks, strict=True):
            env.reset_async(seed=0, options={"task_id": f"train/{task_type}/{variation}"})
        for env in envs:
            env.reset_wait()

    def play() -> None:
        for turn in zip(*actions, strict=True):
            for env, action in zip(envs, turn, strict=True):
                env.step_async(action)
            for env in envs:
                env.step_wait()

    reset()
    started = time.perf_counter() - start
    play()  # a JVM is slow at first
    reset()
    start = time.perf_counter()
    play()
    rate = len(tasks) * len(actions[0]) / (time.perf_counter() - start)
    memory = memory_mb() - before
    for env in envs:
        env.close()
    return started, rate, memory


def paths(tasks, turns: int, folder: str | None) -> list[list[str]]:
    """Returns equally many actions for every task: its gold path, then looks."""
    suite = ScienceWorldSuite(heldout_types=[], gold_folder=folder)
    golden = [suite._gold.path(*task) for task in tasks]
    return [[*path.actions[: max(path.turns - 1, 0)], *["look around"] * turns][:turns] for path in golden]


def show(name: str, worlds: int, started: float, rate: float, memory: float) -> None:
    print(f"{name:8} {worlds:6d} {started:9.1f} {rate:11.1f} {memory:10.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8], help="numbers of worlds")
    parser.add_argument("--turns", type=int, default=20, help="turns per world")
    parser.add_argument("--stock-worlds", type=int, default=8, help="maximum number of stock worlds; 0 for none")
    parser.add_argument("--task-types", type=int, default=8, help="number of task types to cycle through")
    parser.add_argument("--jvms", type=int, nargs="+", default=[1], help="numbers of shared JVMs")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--gold-folder", help="cache of gold paths")
    args = parser.parse_args()
    names = all_task_types()
    names = names[:: len(names) // min(args.task_types, len(names))]
    everything: dict[int, dict[str, tuple[float, float, float]]] = {}
    print("          worlds  start s  turns per s    PSS in MB")
    for worlds in args.worlds:
        tasks = [(names[i % len(names)], i // len(names) % 4) for i in range(worlds)]
        actions = paths(tasks, args.turns, args.gold_folder)
        results = everything[worlds] = {}
        for jvms in args.jvms:
            results["ours"] = measure_ours(tasks, actions, jvms)
            show(f"ours x{jvms}", worlds, *results["ours"])
        if worlds <= args.stock_worlds:
            results["stock"] = measure_stock(tasks, actions)
            show("stock", worlds, *results["stock"])
            (_, fast, small), (_, slow, large) = results["ours"], results["stock"]
            print(f"ratio    {worlds:6d} {'':9} {fast / slow:11.1f} {large / small:10.1f}", flush=True)
    from harness import write  # loads torch, which would count as memory of each stock world if imported above

    write(args.json, options=vars(args), results=everything)


if __name__ == "__main__":
    main()
