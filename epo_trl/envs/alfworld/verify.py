"""Plays games in both engines, side by side, and reports the first difference."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

from epo_trl.envs.alfworld.engine import State
from epo_trl.envs.alfworld.env import AlfworldEnv, Opened, Play
from epo_trl.envs.alfworld.expert import AlfworldExpert
from epo_trl.envs.alfworld.games import GAME_FILE, Game, load_game
from epo_trl.envs.alfworld.stock import StockEngine, StockPlay
from epo_trl.envs.alfworld.world import World
from epo_trl.envs.base import EnvError, Info

POLICIES = {"random": 0.0, "expert": 1.0, "mixed": 0.5}  # share of turns on which the expert moves


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the engines first disagree.

    Args:
        game: Path or id of the game.
        policy: The policy that was played.
        actions: All actions up to the one after which they disagree.
        what: `"observation"`, `"admissible_actions"`, `"won"` or `"error"`.
        fast: What the fast engine says.
        stock: What TextWorld's engine says.
    """

    game: str
    policy: str
    actions: tuple[str, ...]
    what: str
    fast: str
    stock: str

    def __str__(self) -> str:
        after = " > ".join(self.actions) or "the start"
        where = f"{self.game} ({self.policy} policy): {self.what} differs after {after}"
        return f"{where}\n  fast:  {self.fast}\n  stock: {self.stock}"


@dataclass(slots=True)
class Report:
    """What was compared, and what differed."""

    games: int = 0
    steps: int = 0
    wins: int = 0
    task_types: set[str] = field(default_factory=set)
    differences: list[Difference] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing differed."""
        return self.games > 0 and not self.differences

    def summary(self) -> str:
        """Returns the report in a few lines: counts, then the first difference."""
        counts = f"{self.games} games of {len(self.task_types)} task types, {self.steps} steps, {self.wins} wins"
        if not self.differences:
            return f"equal: {counts}"
        return f"DIFFERENT in {len(self.differences)} of {counts}; the first:\n{self.differences[0]}"


def verify_path(path: str | os.PathLike[str], max_games: int = 100, steps: int = 30, seed: int = 0) -> Report:
    """Returns the comparison of both engines on the game files below a folder, or on one file.

    Args:
        path: A `game.tw-pddl` file, or a folder that holds some at any depth.
        max_games: Largest number of games; drawn at random if there are more.
        steps: Largest number of turns in a game.
        seed: Seed of the draw and of the policies.

    Raises:
        EnvError: If there are no game files or one is damaged.
    """
    given = Path(path)
    files = [given] if given.is_file() else sorted(given.rglob(GAME_FILE))
    if not files:
        raise EnvError(f"{given}: there are no files {GAME_FILE} here; run `epo-trl games alfworld --out DIR` first")
    if len(files) > max_games:
        files = sorted(random.Random(seed).sample(files, max_games))
    from tqdm import tqdm

    progress = tqdm(files, desc="fast against stock engine", unit="game")
    return verify_games((load_game(file) for file in progress), steps=steps, seed=seed)


def verify_games(games: Iterable[Game], steps: int = 30, seed: int = 0) -> Report:
    """Returns the comparison of both engines on games. Random, expert and mixed policies take turns."""
    report = Report()
    engine = _PatientEngine()
    try:
        for index, game in enumerate(games):
            policy = list(POLICIES)[index % len(POLICIES)]
            _compare(game, engine, policy, steps, random.Random(f"{seed}/{index}"), report)
    finally:
        engine.close()
    return report


class _PatientEngine(StockEngine):
    """TextWorld's engine without repeated work: the same answers, several times faster.

    It translates a problem once instead of at load and at reset, and derives the wording of an action once per game
    instead of once per turn: furniture does not move, so the wording depends only on the arguments
    that the template names.
    """

    def __init__(self) -> None:
        super().__init__()
        import fast_downward

        self._translator = fast_downward
        self._translate = lru_cache(maxsize=2)(fast_downward.pddl2sas)  # plain and optimized

    def start(self, game: Game) -> StockPlay:
        """Returns a fresh episode of a game."""
        with mock.patch.object(self._translator, "pddl2sas", self._translate):
            play = super().start(game)
        grammar = self._env.unwrapped._logic.grammar
        derive, known = grammar.derive, {}

        def derive_once(start: str, context: dict[str, Any]) -> str:
            if start.startswith("#"):  # an answer, which depends on the state
                return derive(start, context)
            words = set(re.findall(r"\w+", start))
            key = (start, *sorted((s.name, thing.name) for s, thing in context["mapping"].items() if s.name in words))
            if key not in known:
                known[key] = derive(start, context)
            return known[key]

        grammar.derive = derive_once
        return play


def _compare(game: Game, engine: StockEngine, policy: str, steps: int, rng: random.Random, report: Report) -> None:
    """Plays one game in both engines and adds the result to the report."""
    report.games += 1
    actions: list[str] = []

    def differ(what: str, fast: object, stock: object) -> None:
        report.differences.append(Difference(game.source, policy, tuple(actions), what, str(fast), str(stock)))

    try:
        world = World.of(game)
    except EnvError as error:
        return differ("error", error, "(not played)")
    report.task_types.add(world.goal.task_type)
    fast, stock = State(world), engine.start(game)
    env = AlfworldEnv(lambda _: Opened(fast, world.task, world.goal.task_type))
    observation, info = env.reset(options={"task_id": game.source})
    expert = AlfworldExpert(rng.randrange(2**31))
    expert.reset(observation, info)
    expected = stock.describe()
    while True:
        found = _first_difference(observation, expected, fast, stock)
        if found:
            return differ(*found)
        if fast.won or len(actions) == steps:
            report.wins += fast.won
            return None
        action = _choose(expert, observation, info, rng, POLICIES[policy])
        actions.append(action)
        observation, _, _, _, info = env.step(action)
        expected = stock.step(action)
        report.steps += 1


def _choose(expert: AlfworldExpert, observation: str, info: Info, rng: random.Random, share: float) -> str:
    """Returns the expert's action on a share of the turns, else a random one that favours the place in front."""
    _, action = expert.act(observation, info)
    if rng.random() < share:
        return action
    pool: Sequence[str] = info["admissible_actions"]
    if rng.random() < 0.5:
        pool = [other for other in pool if not other.startswith("go to ")]
    return rng.choice(pool)


def _first_difference(observation: str, expected: str, fast: Play, stock: Play) -> tuple[str, object, object] | None:
    if observation != expected:
        return "observation", repr(observation), repr(expected)
    ours, theirs = set(fast.admissible), set(stock.admissible)
    if fast.admissible != stock.admissible:
        return "admissible_actions", f"only here {sorted(ours - theirs)}", f"only here {sorted(theirs - ours)}"
    if fast.won != stock.won:
        return "won", fast.won, stock.won
    return None
