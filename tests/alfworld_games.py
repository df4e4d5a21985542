"""Helpers of the ALFWorld tests: episodes of an expert, and games with what only real ones hold."""

import json
import os
import re
import tempfile
from dataclasses import replace

os.environ.setdefault("ALFWORLD_DATA", os.path.join(tempfile.gettempdir(), "alfworld-tests"))

from epo_trl.envs.alfworld.game_files import Game
from epo_trl.envs.alfworld.generator import generate
from epo_trl.envs.alfworld.task_specs import Filters

SMALL = Filters(room_types=("bedrooms", "bathrooms"), max_receptacles=16)
ALL_TYPES_KITCHEN = Filters(room_types=("kitchens",), max_receptacles=20)


def small_game(index: int = 0, seed: int = 0, filters: Filters = SMALL) -> Game:
    return generate("train", index, seed, filters).game


def play(env, task_id, expert, turns=50):
    """Returns the turns (observation, info, thought, action) of an episode, and whether it was won."""
    observation, info = env.reset(options={"task_id": task_id})
    expert.reset(observation, info)
    log = []
    for _ in range(turns):
        thought, action = expert.act(observation, info)
        log.append((observation, info, thought, action))
        observation, _, won, _, info = env.step(action)
        if won:
            return log, True
    return log, False


def one_of_each_type(split: str, seed: int) -> list[Game]:
    """Returns the first generated game of each of the six task types."""
    games = {}
    for index in range(23):
        generated = generate(split, index, seed)
        games.setdefault(generated.spec.task_type, generated.game)
    return list(games.values())


def edit(game: Game, drop: str = "", *facts: str) -> Game:
    """Returns the game without the facts that match a pattern, and with other facts at the end of its `(:init`."""
    start = game.problem.index("(:init")
    end = game.problem.rindex("\n)", start, game.problem.index("(:goal"))
    init = game.problem[start:end]
    if drop:
        init = re.sub(drop, "", init)
    return replace(game, source="edited", problem="\n".join([game.problem[:start], init, *facts, game.problem[end:]]))


def pairs(game: Game, predicate: str) -> list[tuple[str, ...]]:
    """Returns the arguments of all facts with a predicate, as written."""
    return [tuple(row.split()) for row in re.findall(rf"\({predicate} ([^()]+)\)", game.problem.split("(:goal")[0])]


def game_like_the_real_ones(index: int = 0, seed: int = 3) -> Game:
    """Returns a kitchen game with movable containers that hold things, things on two receptacles, things that are
    nearest to another place, a drawer that cannot be opened, one that is open, and an agent that starts somewhere."""
    game = generate("train", index, seed, ALL_TYPES_KITCHEN).game
    holders = [row[0] for row in pairs(game, "isReceptacleObject")]
    things = [row for row in pairs(game, "inReceptacle") if row[0] not in holders]
    places = dict(pairs(game, "receptacleAtLocation"))
    openable = [row[0] for row in pairs(game, "openable")]
    stuck, ajar = openable[0], openable[1]
    first, second, third = things[0], things[len(things) // 2], things[-1]
    other = next(place for place in places if place != first[1] and place not in openable)
    far = places[other]
    extra = [
        f"(inReceptacleObject {second[0]} {holders[0]})",
        f"(inReceptacleObject {third[0]} {holders[0]})",
        f"(inReceptacle {first[0]} {other})",
        f"(objectAtLocation {second[0]} {far})",
        f"(wasInReceptacle {third[0]} {third[1]})",
        f"(opened {ajar})",
        f"(isClean {first[0]})",
    ]
    return edit(game, rf"\(openable {stuck}\)|\(objectAtLocation {re.escape(second[0])} [^()]*\)", *extra)


def starting_at_a_receptacle(game: Game) -> Game:
    location = pairs(game, "receptacleAtLocation")[0][1]
    return edit(game, r"\(atLocation agent1 [^()]*\)", f"(atLocation agent1 {location})")


def as_downloaded(game: Game) -> Game:
    """Returns the game in the form of the games that `alfworld-download` gives: the answer to `help` is a literal on
    many lines instead of a named text, and the rules clean in a sink too."""
    named = re.search(r'feedback :: "#help\.feedback#";\s*grammar :: """(.*?)""";', game.grammar, re.DOTALL)
    answer = json.loads(named.group(1))["help.feedback"][0]["rhs"]
    grammar = game.grammar.replace(named.group(0), f'feedback :: "{answer}";')
    basin = "(receptacleType ?r SinkBasinType)"
    domain = game.domain.replace(basin, f"(receptacleType ?r SinkType) {basin}")
    return replace(game, grammar=grammar, domain=domain)
