"""Checks whether ScienceWorld worlds that share a JVM affect each other, in episodes that create many objects.

python benchmarks/scienceworld_neighbours.py --episodes 50 --turns 30 --strangers 4

A player pours, dunks, mixes, heats, plants, waits and teleports. Its actions are played three times: by a world with
its own JVM, by a world on a JVM where other worlds are loaded again and again, and by the stock Python wrapper in its
own process and JVM. All must give the same results. The episodes cycle through all 30 task types.
"""

import argparse
import os
import random
import zlib
from collections.abc import Iterator, Sequence

from epo_trl.envs.scienceworld import ScienceWorldSuite, TaskLists
from epo_trl.envs.scienceworld.jvm import DETERMINISTIC, find_java
from epo_trl.envs.scienceworld.tasks import all_task_types

ERRANDS = (  # each creates objects: soil, puddles, mixtures, steam, ash, plants
    "teleport to outside; pick up shovel; use shovel in inventory on ground; use shovel in inventory on ground; "
    "pick up soil; wait1; look around",
    "teleport to kitchen; activate sink; pick up glass jar; dunk glass jar in sink; move glass jar to sink; wait1; "
    "pick up glass jar; pour glass jar in kitchen; look around",
    "teleport to outside; dunk glass jar in fountain; pour glass jar in outside; look around",
    "teleport to bathroom; activate bathtub; pick up glass cup; dunk glass cup in bathtub; pour glass cup in bathroom; "
    "dunk glass cup in toilet; pour glass cup in bathroom; flush toilet; look around",
    "teleport to art studio; pour cup containing red paint in cup containing blue paint; "
    "mix cup containing blue paint; pour cup containing yellow paint in jug; pour jug in art studio; look around",
    "teleport to greenhouse; move soil in inventory to flower pot 1; move apple seed to flower pot 1; activate sink; "
    "dunk jug in sink; pour jug in flower pot 1; pour jug in flower pot 2; wait; wait; look around",
    "teleport to kitchen; pick up metal pot; move metal pot to sink; activate sink; wait1; move metal pot to stove; "
    "activate stove; wait; wait; look around",
    "teleport to outside; pick up wood; move wood to fire pit; pick up lighter; use lighter on wood; wait1; wait; "
    "look around",
    "teleport to kitchen; pick up lighter; open cupboard; open fridge; pick up orange; pour orange juice in bowl; "
    "pour orange juice in kitchen; move soap to bowl; mix bowl; look around",
    "teleport to workshop; teleport to foundry; activate sink; pour glass jar in foundry; activate blast furnace",
)


class Spiller:
    """A player that runs random errands which create objects, and answers ambiguous requests.

    Args:
        rng: Random generator of its choices.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.todo = rng, []

    def __call__(self, observation: str) -> str:
        """Returns the next action."""
        if observation.startswith("Ambiguous request"):
            return "0"
        if not self.todo:
            self.todo = self.rng.choice(ERRANDS).split("; ")
        return self.todo.pop(0)


def draw(count: int, seed: int = 0) -> list[str]:
    """Draws training tasks, of all task types in turn."""
    ids: dict[str, list[str]] = {}
    for task_id in TaskLists(heldout_types=[], sampling="variations").ids["train"]:
        ids.setdefault(task_id.split("/")[1], []).append(task_id)
    rng = random.Random(seed)
    return [rng.choice(ids[name]) for name in (all_task_types() * (count // 30 + 1))[:count]]


def play(env, task_id: str, turns: int, actions: Sequence[str] | None = None, between=lambda: None):
    """Plays the given actions, or the player's, and returns the actions and their results.

    Args:
        env: Environment of this package.
        task_id: Id of the task.
        turns: Maximum number of turns.
        actions: Actions to play, in place of the player's choice.
        between: Called before each action.
    """
    player = Spiller(random.Random(task_id))
    observation, info = env.reset(seed=0, options={"task_id": task_id})
    chosen, seen = [], [(observation, 0.0, False, False, info)]
    for turn in range(turns):
        between()
        chosen.append(actions[turn] if actions is not None else player(observation))
        seen.append(env.step(chosen[-1]))
        observation, _, terminated, *_ = seen[-1]
        if terminated:
            break
    return chosen, seen


class Strangers:
    """Other worlds on the same JVM, which are loaded and play between the turns of the tested world.

    Args:
        envs: Environments of the other worlds.
        tasks: Tasks that they may play.
        seed: Seed of all their choices.
    """

    def __init__(self, envs, tasks: Sequence[str], seed: str) -> None:
        self.envs, self.tasks, self.rng = envs, tasks, random.Random(f"strangers {seed}")
        self.players: dict[int, Spiller] = {}

    def __call__(self) -> None:
        """Lets one of four load a task, and one of four make a step."""
        for i, env in enumerate(self.envs):
            what = self.rng.random()
            if what < 0.25:
                env.reset(seed=1, options={"task_id": self.rng.choice(self.tasks)})
                self.players[i] = Spiller(self.rng)
            elif what < 0.5 and i in self.players:
                env.step(self.players[i](""))


def make_stock(options: Sequence[str] = DETERMINISTIC):
    """Creates a stock environment whose JVM gets the options."""
    from unittest.mock import patch

    from scienceworld import ScienceWorldEnv

    path = os.pathsep.join((os.path.dirname(find_java()), os.environ["PATH"]))
    with patch.dict(os.environ, PATH=path, JAVA_TOOL_OPTIONS=" ".join(options)):
        return ScienceWorldEnv("", None, envStepLimit=10**6)


def play_stock(env, task_id: str, actions: Sequence[str]) -> Iterator[tuple[str, int, bool, str, str]]:
    """Yields (observation, score, whether it is over, look, inventory) of the start and of each turn.

    The stock engine is noisy: its random draws depend on the wrapper's calls. So it is seeded before each input, as in
    this package. After an ambiguous request it would lose the next action; this package withdraws the request.
    """
    _, task_type, variation = task_id.split("/")
    chance = getattr(getattr(env._gateway.jvm.scala.util, "Random$"), "MODULE$")
    env.load(task_type, int(variation), "easy")
    observation, info = env.reset()
    yield observation, info["score"], False, info["look"], info["inv"]
    for number, action in enumerate(actions, 1):
        if observation.startswith("Ambiguous request") and not action.isdecimal():
            env.server.agentInterface().get().inputParser().clearAmbiguousState()
        chance.setSeed(zlib.crc32(f"0 {number}".encode()))
        observation, _, done, info = env.step(action)
        yield observation, info["score"], done, info["look"], info["inv"]


def as_stock(seen) -> list[tuple[str, int, bool, str, str]]:
    """Converts the results of `play` to the form of `play_stock`."""
    return [(text, info["score"], over, info["look"], info["inventory"]) for text, _, over, _, info in seen]


def first_difference(one, other) -> str:
    """Describes the first difference between two lists of turns, ignoring white space; empty if there is none."""

    def plain(turn):
        return [" ".join(part.split()) if isinstance(part, str) else part for part in turn]

    if len(one) != len(other):
        return f"{len(one)} turns, {len(other)} turns"
    for turn, pair in enumerate(zip(map(plain, one), map(plain, other), strict=True)):
        if pair[0] != pair[1]:
            return next(f"turn {turn}: {a!r}, {b!r}" for a, b in zip(*pair, strict=True) if a != b)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--turns", type=int, default=30, help="maximum number of turns per episode")
    parser.add_argument("--strangers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-stock", action="store_true", help="skip the stock engine")
    args = parser.parse_args()
    alone = ScienceWorldSuite(heldout_types=[]).make_env()
    crowd = ScienceWorldSuite(heldout_types=[])
    crowded, *others = (crowd.make_env() for _ in range(1 + args.strangers))
    stock = None if args.no_stock else make_stock()
    tasks = draw(args.episodes, args.seed)
    differ = {"among strangers": 0, "stock": 0}
    turns = 0
    for number, task_id in enumerate(tasks, 1):
        actions, seen = play(alone, task_id, args.turns)
        turns += len(actions)
        _, again = play(crowded, task_id, len(actions), actions, Strangers(others, tasks, task_id))
        results = {"among strangers": first_difference(seen, again)}
        if stock is not None:
            results["stock"] = first_difference(as_stock(seen), list(play_stock(stock, task_id, actions)))
        for name, difference in results.items():
            differ[name] += bool(difference)
            if difference:
                print(f"{task_id}, alone and {name}: {difference[:400]}", flush=True)
        print(f"{number} episodes, {turns} turns; differ: {differ}", flush=True)
    for env in (alone, crowded, *others):
        env.close()
    if stock is not None:
        stock.close()


if __name__ == "__main__":
    main()
