"""The constant part of an ALFWorld game: parsed once and shared by all its episodes."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from epo_trl.envs.alfworld.game_files import Game, without_task
from epo_trl.envs.alfworld.pddl import FactTable, Goal, display_names, read_facts, read_goal, without_comments
from epo_trl.envs.base import EnvError

# SHA-256 of the rules and texts that the fast engine reproduces: alfworld 0.4.0 to 0.4.2.
KNOWN_DOMAIN = "da18d44ab1bcf831f61e90b88a99ad5766d8bbb562b6f87839b4b6ace4f796fe"
KNOWN_GRAMMAR = "6615c5ece130a3c9747e080f57cc32f6d1bc3d933a494a605c111e3776764924"

Names = frozenset[str]


@dataclass(frozen=True, slots=True)
class Start:
    """Initial values of everything that may change during the game. See `engine.State`."""

    location: str
    opened: Names
    contents: dict[str, tuple[str, ...]]
    seen_from: dict[str, Names]
    marks: dict[str, Names]


@dataclass(frozen=True)
class Scene:
    """The constant part of a game, with the names that the agent sees. Build it with `Scene.of(game)`."""

    task: str  # in words
    goal: Goal
    receptacles: dict[str, str]  # location, in the order of the game's lists
    receptacle_type: dict[str, str]
    object_type: dict[str, str]
    holdable: dict[str, Names]  # by receptacle type: the object types that may be put there
    # By property (`"openable"`, `"pickupable"`, `"cleanable"`, ...): the things that have it.
    having: dict[str, Names]
    inside: dict[str, tuple[str, ...]]  # by movable container: its contents
    rank: dict[str, int]  # of a name in the game's lists
    help_text: str  # response to `help`
    start: Start
    at: dict[str, tuple[str, ...]] = field(init=False)
    _travel: dict[str, tuple[dict[str, str], list[str]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        at = defaultdict(list)
        for receptacle, location in self.receptacles.items():
            at[location].append(receptacle)
        object.__setattr__(self, "at", {location: tuple(names) for location, names in at.items()})

    @classmethod
    def of(cls, game: Game) -> Scene:
        """Builds the scene of a game.

        Raises:
            EnvError: If the fast engine does not support the rules, the texts, a fact or the goal.
        """
        help_text = _check_rules(game)
        facts = read_facts(game.problem, game.source)
        names = display_names(argument for rows in facts.values() for row in rows for argument in row)
        rank = {names[i]: place for place, i in enumerate(sorted(names))}
        shown = _Shown(facts, names, rank)
        kinds = shown.types("receptacletype")
        if "sink" in kinds.values():
            raise EnvError(f"{game.source}: the fast engine does not support the receptacle type 'sink'")
        return cls(
            task=game.task,
            goal=read_goal(game.problem, game.source),
            receptacles=dict(shown.pairs("receptacleatlocation")),
            receptacle_type=kinds,
            object_type=shown.types("objecttype"),
            holdable=_holdable(facts),
            having={name: shown.having(name) for name in _PROPERTIES},
            inside=shown.grouped("inreceptacleobject"),
            rank=rank,
            help_text=help_text,
            start=_start(shown),
        )

    def travel(self, location: str) -> tuple[dict[str, str], list[str]]:
        """Returns the `go to` actions at a location: a map from action to destination, and the sorted actions."""
        if location not in self._travel:
            actions = {f"go to {r}": there for r, there in self.receptacles.items() if there != location}
            self._travel[location] = actions, sorted(actions)
        return self._travel[location]


_PROPERTIES = (
    *("openable", "pickupable", "toggleable", "sliceable", "isreceptacleobject"),
    *("cleanable", "heatable", "coolable"),
)
_MARKS = {"clean": "isclean", "hot": "ishot", "cool": "iscool", "toggled": "istoggled", "sliced": "issliced"}


class _Shown:
    """The facts of a game with ids replaced by display names."""

    def __init__(self, facts: FactTable, names: dict[str, str], rank: dict[str, int]) -> None:
        self.facts, self.names, self.rank = facts, names, rank

    def having(self, predicate: str) -> Names:
        return frozenset(self.names[row[0]] for row in self.facts.get(predicate, ()))

    def types(self, predicate: str) -> dict[str, str]:
        return {self.names[thing]: kind.removesuffix("type") for thing, kind in self.facts.get(predicate, ())}

    def pairs(self, predicate: str) -> list[tuple[str, str]]:
        """Returns the pairs of a fact with two arguments, in list order."""
        rows = {(self.names[a], self.names[b]) for a, b in self.facts.get(predicate, ())}
        return sorted(rows, key=lambda row: (self.rank[row[0]], self.rank[row[1]]))

    def grouped(self, predicate: str) -> dict[str, tuple[str, ...]]:
        """Maps each second argument to its first arguments, in list order."""
        return _grouped((second, first) for first, second in self.pairs(predicate))


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    groups = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return {key: tuple(values) for key, values in groups.items()}


def _holdable(facts: FactTable) -> dict[str, Names]:
    kinds = _grouped((r.removesuffix("type"), o.removesuffix("type")) for r, o in facts.get("cancontain", ()))
    return {receptacle: frozenset(things) for receptacle, things in kinds.items()}


def _start(shown: _Shown) -> Start:
    ((_, agent_at),) = shown.pairs("atlocation")
    return Start(
        location=agent_at,
        opened=shown.having("opened"),
        contents=shown.grouped("inreceptacle"),
        seen_from={thing: frozenset(at) for thing, at in _grouped(shown.pairs("objectatlocation")).items()},
        marks={mark: shown.having(predicate) for mark, predicate in _MARKS.items()},
    )


def _check_rules(game: Game) -> str:
    """Checks that a game has the supported rules and texts, and returns its help text."""
    unknown = (
        f"{game.source}: the fast engine supports the rules and texts of alfworld 0.4, but this game has other {{}}; "
        "play it with engine='textworld', or update the games with `alfworld-download --force`"
    )
    if _domain_hash(game.domain) != KNOWN_DOMAIN:
        raise EnvError(unknown.format("rules ('pddl_domain')"))
    grammar = _with_named_help(game.grammar)
    help_text = re.search(_NAMED_HELP, grammar)
    if _hash(without_task(grammar)) != KNOWN_GRAMMAR or help_text is None:
        raise EnvError(unknown.format("texts ('grammar')"))
    return json.loads(help_text.group(1)).removeprefix("\n")


_NAMED_HELP = r'"help\.feedback": \[\s*\{\s*"rhs": ("(?:[^"\\]|\\.)*")'


def _with_named_help(grammar: str) -> str:
    """Rewrites the grammar so that the response to `help` is a named text.

    The alfworld package's own grammar names it; the downloaded games have it as a literal on many lines.
    """

    def named(match: re.Match[str]) -> str:
        rule = f'{{ "help.feedback": [ {{ "rhs": {json.dumps(match.group(1))} }} ] }}'
        return f'feedback :: "#help.feedback#"; grammar :: """ {rule} """;'

    return re.sub(r'feedback :: "(\nAvailable commands:[^"]*)";', named, grammar)


@lru_cache(maxsize=8)
def _domain_hash(domain: str) -> str:
    """Hashes the rules without comments, layout, and cleaning in a "sink", which no room has.

    Rooms have a "sinkbasin". Some published games allow both, and `Scene.of` rejects a room with a "sink".
    """
    words = " ".join(without_comments(domain).lower().split())
    return _hash(words.replace("(receptacletype ?r sinktype) ", ""))


def _hash(text: str) -> str:
    """Hashes a text without its layout."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()
