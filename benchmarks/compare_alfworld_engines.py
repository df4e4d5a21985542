"""Compares the fast ALFWorld engine with TextWorld's on game files: observations, admissible actions and `won`.

    python benchmarks/compare_alfworld_engines.py $ALFWORLD_DATA --max-games 200

A random, an expert and a mixed policy play each game in both engines side by side, with malformed inputs among their
actions. Prints the first difference and the inputs that lead to it, and exits with 1 if there is one. TextWorld
evaluates the texts of a game file as Python: do not compare files from strangers.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

from epo_trl.cli.base import at_least
from epo_trl.envs.alfworld import AlfworldEnv, AlfworldExpert
from epo_trl.envs.alfworld.engine import State
from epo_trl.envs.alfworld.env import Opened, Play
from epo_trl.envs.alfworld.game_files import Game, find_games, load_game
from epo_trl.envs.alfworld.pddl import TASK_TYPES
from epo_trl.envs.alfworld.scene import Scene
from epo_trl.envs.alfworld.textworld_engine import TextWorldEngine, TextWorldPlay
from epo_trl.envs.base import EnvError, Info

POLICIES = {"random": 0.0, "expert": 1.0, "mixed": 0.5}  # share of the expert's turns
ODD_SHARE = 0.25  # share of turns with a text that a model might write instead of an action
_WIDE_DIGITS = str.maketrans("0123456789", "０１２３４５６７８９")
ODD_FORMS: tuple[Callable[[str], str], ...] = (
    *(str.upper, str.title, str.swapcase),
    lambda action: "",
    lambda action: " \t\n",
    lambda action: f"  {action}\t\n",  # the only form that is accepted: white space around an action
    lambda action: f"\u00a0{action}\u3000",
    lambda action: action.replace(" ", "  "),
    lambda action: action.replace(" ", "\t"),
    lambda action: action.replace(" ", "\n", 1),
    lambda action: action.split()[0],
    lambda action: action[:-1],
    lambda action: action[1:],
    lambda action: f"> {action}",
    lambda action: f"{action}.",
    lambda action: f"{action} 🔨",
    lambda action: f"{action}\0",
    lambda action: f"\u200b{action}",
    lambda action: action.translate(_WIDE_DIGITS),
    lambda action: " ".join([action] * 2000),
)


@dataclass(slots=True)
class Report:
    """Counts of a comparison, and a text for each difference."""

    games: int = 0
    steps: int = 0
    odd_inputs: int = 0
    wins: int = 0
    task_types: set[str] = field(default_factory=set)
    differences: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether games were compared and none differed."""
        return self.games > 0 and not self.differences

    def summary(self) -> str:
        """Formats the counts, then the first difference."""
        counts = (
            f"{self.games} games of {len(self.task_types)} task types, {self.steps} steps "
            f"({self.odd_inputs} inadmissible or odd inputs), {self.wins} wins"
        )
        if not self.differences:
            return f"equal: {counts}"
        return f"{len(self.differences)} differences in {counts}; the first:\n{self.differences[0]}"


def compare(games: Iterable[Game], steps: int = 40, seed: int = 0) -> Report:
    """Compares both engines on games, each played once with every policy.

    Args:
        games: Games to compare. A game that the fast engine rejects counts as different, and the others continue.
        steps: Maximum number of inputs per episode.
        seed: Seed of the policies and of the odd inputs.
    """
    report = Report()
    with CachedTextWorld() as engine:
        for game in games:
            report.games += 1
            try:
                scene = Scene.of(game)
            except EnvError as error:
                report.differences.append(f"not compared: {error}")
                continue
            report.task_types.add(scene.goal.task_type)
            for policy in POLICIES:
                rng = random.Random(f"{seed}/{policy}/{game.problem}")
                _compare_episode(game, scene, engine.start(game), policy, steps, rng, report)
    return report


def _compare_episode(
    game: Game, scene: Scene, stock: Play, policy: str, steps: int, rng: random.Random, report: Report
) -> None:
    """Plays one episode in both engines and adds the result to the report."""
    fast = State(scene)
    env = AlfworldEnv(lambda _: Opened(fast, scene.task, scene.goal.task_type))
    observation, info = env.reset(options={"task_id": game.source})
    expected = stock.describe()
    player = _Player(POLICIES[policy], rng, observation, info)
    inputs: list[str] = []
    while not (found := _first_difference(observation, expected, fast, stock)):
        if fast.won or len(inputs) == steps:
            report.wins += fast.won
            return
        inputs.append(player.next_input(observation, info))
        report.steps += 1
        report.odd_inputs += inputs[-1] not in info["admissible_actions"]
        observation, _, _, _, info = env.step(inputs[-1])
        expected = stock.step(inputs[-1])
    after = " > ".join(repr(text)[:80] for text in inputs) or "the start"
    report.differences.append(f"{game.source} ({policy} policy) after {after}: {found}")


class _Player:
    """Chooses the inputs of both engines: actions, and sometimes an odd form of one before it or instead of it."""

    def __init__(self, expert_share: float, rng: random.Random, observation: str, info: Info) -> None:
        self._share, self._random = expert_share, rng
        self._expert = AlfworldExpert(rng.randrange(2**31))
        self._expert.reset(observation, info)
        self._waiting = ""

    def next_input(self, observation: str, info: Info) -> str:
        if self._waiting:
            action, self._waiting = self._waiting, ""
            return action
        action = self._choose(observation, info)
        if self._random.random() >= ODD_SHARE:
            return action
        odd = self._random.choice(ODD_FORMS)(action)
        self._waiting = "" if odd.strip() == action else action
        return odd

    def _choose(self, observation: str, info: Info) -> str:
        """Chooses the expert's action on a share of the turns, else a random one, preferably at the agent's place."""
        _, action = self._expert.act(observation, info)
        if self._random.random() < self._share:
            return action
        pool: Sequence[str] = info["admissible_actions"]
        if self._random.random() < 0.5:
            pool = [other for other in pool if not other.startswith("go to ")]
        return self._random.choice(pool)


def _first_difference(observation: str, expected: str, fast: Play, stock: Play) -> str:
    if observation != expected:
        return f"observation\n  fast:  {observation!r}\n  stock: {expected!r}"
    if fast.admissible != stock.admissible:
        ours, theirs = set(fast.admissible), set(stock.admissible)
        return f"admissible actions\n  fast only:  {sorted(ours - theirs)}\n  stock only: {sorted(theirs - ours)}"
    return f"won\n  fast:  {fast.won}\n  stock: {stock.won}" if fast.won != stock.won else ""


class CachedTextWorld(TextWorldEngine):
    """TextWorld's engine with four kinds of repeated work cached: the same responses, several times faster.

    - A problem is translated once, not at both load and reset, and not for a planner that is not used here.
    - A text of the grammar is parsed once, not at each use.
    - The wording of an action is derived once per game, not once per turn: furniture does not move, so it depends only
      on the arguments that the template names.
    - The context of a response is shared, not deep-copied for each symbol of the grammar.

    Within its `with` block, TextWorld is patched in the whole process.
    """

    def __enter__(self) -> CachedTextWorld:
        import fast_downward
        from textworld.envs.pddl import textgen

        translate = lru_cache(maxsize=1)(fast_downward.pddl2sas)
        parse = lru_cache(maxsize=None)(textgen._parse_and_convert)
        query = lru_cache(maxsize=None)(textgen.Rule.parse_conjunctive_query)
        self._changes = ExitStack()
        for owner, name, new in (
            (fast_downward, "pddl2sas", lambda domain, problem, **_: translate(domain, problem)),
            # Each caller modifies the symbols that it gets.
            (textgen, "_parse_and_convert", lambda text, rule_name, **_: deepcopy(parse(text, rule_name=rule_name))),
            (textgen.Rule, "parse_conjunctive_query", query),
            (textgen, "copy_context", _copy_context),
        ):
            self._changes.enter_context(mock.patch.object(owner, name, new))
        return self

    def __exit__(self, *_: object) -> None:
        self._changes.close()
        self.close()

    def start(self, game: Game) -> TextWorldPlay:
        fresh = game != self._loaded
        play = super().start(game)
        if fresh:
            grammar = self._env.unwrapped._logic.grammar
            grammar.derive = _once_per_wording(grammar.derive)
        return play


def _copy_context(context: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy whose variables and mapping can be extended; their values are never modified."""
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


def _once_per_wording(derive: Callable[[str, dict[str, Any]], str]) -> Callable[[str, dict[str, Any]], str]:
    known: dict[tuple[Any, ...], str] = {}

    def derive_once(start: str, context: dict[str, Any]) -> str:
        if start.startswith("#"):  # a response, which depends on the state
            return derive(start, context)
        names = set(re.findall(r"\w+", start))
        key = (start, *sorted((s.name, thing.name) for s, thing in context["mapping"].items() if s.name in names))
        if key not in known:
            known[key] = derive(start, context)
        return known[key]

    return derive_once


def main() -> int:
    """Compares a sample of the games below a folder and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder of games, for example $ALFWORLD_DATA")
    parser.add_argument("--max-games", type=at_least(1), default=100, help="number of games in the random sample")
    parser.add_argument("--steps", type=at_least(1), default=40, help="number of inputs per episode")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample and the policies")
    args = parser.parse_args()
    files, _ = find_games(args.path, TASK_TYPES)
    sample = sorted(random.Random(args.seed).sample(files, min(args.max_games, len(files))))
    from tqdm import tqdm

    report = compare(map(load_game, tqdm(sample, unit="game")), args.steps, args.seed)
    print(report.summary())
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
