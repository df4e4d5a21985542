"""Plays games in both engines in parallel and reports the first difference."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from epo_trl.envs.alfworld.engine import State
from epo_trl.envs.alfworld.env import AlfworldEnv, Opened, Play
from epo_trl.envs.alfworld.expert import AlfworldExpert
from epo_trl.envs.alfworld.game_files import FoundGames, Game, find_games, load_game
from epo_trl.envs.alfworld.parse_cache import CachedTextWorldEngine
from epo_trl.envs.alfworld.pddl import TASK_TYPES
from epo_trl.envs.alfworld.scene import Scene
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


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between the engines in a game.

    Args:
        game: Path or id of the game.
        policy: Policy that was played.
        actions: All actions up to the one after which the engines differ.
        what: `"observation"`, `"admissible_actions"`, `"won"` or `"error"`.
        fast: Result of the fast engine.
        stock: Result of TextWorld's engine.
    """

    game: str
    policy: str
    actions: tuple[str, ...]
    what: str
    fast: str
    stock: str

    def __str__(self) -> str:
        if self.what == "error":
            return f"not compared: {self.fast}"
        after = " > ".join(map(_shown, self.actions)) or "the start"
        where = f"{self.game} ({self.policy} policy): {self.what} differs after {after}"
        return f"{where}\n  fast:  {self.fast}\n  stock: {self.stock}"


def _shown(action: str) -> str:
    """Formats an input for one line: odd ones in quotes, long ones shortened."""
    return action if re.fullmatch(r"\w+( \w+)*", action) and action.islower() else repr(action)[:80]


@dataclass(slots=True)
class Report:
    """Counts and differences of a comparison. `found` describes the games in the folder and those left out."""

    found: str = ""
    games: int = 0
    steps: int = 0
    odd_inputs: int = 0
    wins: int = 0
    task_types: set[str] = field(default_factory=set)
    differences: list[Difference] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether games were compared and none differed."""
        return self.games > 0 and not self.differences

    def summary(self) -> str:
        """Formats the report in a few lines: counts, then the first difference."""
        counts = (
            f"{self.games} games of {len(self.task_types)} task types, {self.steps} steps "
            f"({self.odd_inputs} inadmissible or odd inputs), {self.wins} wins"
        )
        found = f"\n(found {self.found})" if self.found else ""
        if not self.differences:
            return f"equal: {counts}{found}"
        different = len({difference.game for difference in self.differences})  # one per policy may be of one game
        return f"DIFFERENT or refused: {different} of {counts}{found}; the first:\n{self.differences[0]}"


def verify_path(path: str | os.PathLike[str], max_games: int = 100, steps: int = 40, seed: int = 0) -> Report:
    """Compares both engines on the playable games below a folder, or on one game file.

    Args:
        path: A `game.tw-pddl` file, or a folder with such files at any depth. Of a folder, the games that
            `AlfworldData` lists are compared.
        max_games: Maximum number of games; drawn at random if there are more.
        steps: Maximum number of inputs per episode.
        seed: Seed of the draw and of the policies.

    Raises:
        EnvError: If there are no playable games or one is corrupt.
    """
    given = Path(path)
    found = FoundGames((given,), {}) if given.is_file() else find_games(given, TASK_TYPES)
    files = list(found.games)
    if not files:
        raise EnvError(
            f"{given}: no playable game ({found}). Run `alfworld-download` for the real games or "
            "`epo-trl games alfworld --out DIR` for generated ones"
        )
    if len(files) > max_games:
        files = sorted(random.Random(seed).sample(files, max_games))
    from tqdm import tqdm

    progress = tqdm(files, desc="fast against stock engine", unit="game")
    report = verify_games((load_game(file) for file in progress), steps=steps, seed=seed)
    report.found = str(found)
    return report


def verify_games(games: Iterable[Game], steps: int = 40, seed: int = 0) -> Report:
    """Compares both engines on games, each played once with every policy of `POLICIES`.

    Args:
        games: Games to compare. A game that an engine rejects counts as different, and the others continue.
        steps: Maximum number of inputs per episode.
        seed: Seed of the policies and of the odd inputs.
    """
    report = Report()
    engine = CachedTextWorldEngine()
    try:
        for game in games:
            report.games += 1
            try:
                scene = Scene.of(game)
                report.task_types.add(scene.goal.task_type)
                for policy in POLICIES:
                    _compare(
                        game, scene, engine, policy, steps, random.Random(f"{seed}/{policy}/{game.problem}"), report
                    )
            except EnvError as error:
                report.differences.append(Difference(game.source, "any", (), "error", str(error), ""))
    finally:
        engine.close()
    return report


def _compare(
    game: Game, scene: Scene, engine: CachedTextWorldEngine, policy: str, steps: int, rng: random.Random, report: Report
) -> None:
    """Plays one episode in both engines and adds the result to the report."""
    fast, stock = State(scene), engine.start(game)
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
    report.differences.append(Difference(game.source, policy, tuple(inputs), *found))


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


def _first_difference(observation: str, expected: str, fast: Play, stock: Play) -> tuple[str, str, str] | None:
    if observation != expected:
        return "observation", repr(observation), repr(expected)
    ours, theirs = set(fast.admissible), set(stock.admissible)
    if fast.admissible != stock.admissible:
        return "admissible_actions", f"only here {sorted(ours - theirs)}", f"only here {sorted(theirs - ours)}"
    if fast.won != stock.won:
        return "won", str(fast.won), str(stock.won)
    return None
