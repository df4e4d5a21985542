import random
from dataclasses import replace

import pytest
from alfworld_games import ALL_TYPES_KITCHEN, SMALL, as_downloaded, game_like_the_real_ones, small_game

from epo_trl.envs.alfworld.engine import State
from epo_trl.envs.alfworld.pddl import Goal, display_names, read_goal
from epo_trl.envs.alfworld.scene import Scene
from epo_trl.envs.base import EnvError


def test_names_are_numbered_from_the_last_id_and_basins_keep_their_name():
    ids = ["mug_bar_1", "mug_bar_2", "sink_bar_1_bar_sinkbasin", "agent1"]
    assert display_names(ids) == {
        "agent1": "agent1 ",
        "mug_bar_1": "mug 2",
        "mug_bar_2": "mug 1",
        "sink_bar_1_bar_sinkbasin": "sinkbasin 1",
    }


@pytest.mark.parametrize("state", ["", "(isHot ?o)"])
def test_a_goal_is_one_of_alfred_s_six(state):
    """As in a downloaded game; one with another literal is refused with its text and file."""
    text = f"""(:goal (and (exists (?r - receptacle) (exists (?o - object) (and (inReceptacle ?o ?r)
        {state} (objectType ?o EggType) (receptacleType ?r SafeType) ) ) ) ) ) )"""
    if not state:
        assert read_goal(text, "a/game.tw-pddl") == Goal("pick_and_place_simple", "egg", "safe")
    else:
        with pytest.raises(EnvError, match=r"a/game\.tw-pddl.*\(:goal.*engine='textworld'"):
            read_goal(text, "a/game.tw-pddl")


def test_other_rules_or_texts_are_refused():
    game = small_game()
    assert Scene.of(replace(game, domain=game.domain.replace("\n", "  ; a comment\n\n"))).task  # layout does not matter
    with pytest.raises(EnvError, match="pddl_domain"):
        Scene.of(replace(game, domain=game.domain.replace("(isHot ?o)", "(isCool ?o)")))
    for known, other in (("You open the", "You pry open the"), ("move {o} to {r}", "put {o} in/on {r}")):  # before 0.4
        with pytest.raises(EnvError, match="grammar.*alfworld-download --force"):
            Scene.of(replace(game, grammar=game.grammar.replace(known, other)))


def test_heat_and_cool_undo_each_other():
    state = State(Scene.of(game_like_the_real_ones(index=0)))
    egg = next(name for name, kind in state.scene.object_type.items() if kind == "egg")
    state.held = egg
    state._refresh()
    for action in ("go to microwave 1", f"heat {egg} with microwave 1"):
        state.step(action)
    assert state.step(f"examine {egg}") == f"This is a hot {egg}."
    for action in ("go to fridge 1", f"cool {egg} with fridge 1"):
        state.step(action)
    assert state.step(f"examine {egg}") == f"This is a cold {egg}."


def test_games_in_the_form_of_the_download_are_the_same_games():
    """All 3,827 downloaded games have the answer to `help` as a literal, and rules that clean in a sink too."""
    game = small_game()
    downloaded = as_downloaded(game)
    assert "#help.feedback#" not in downloaded.grammar and "SinkType)" in downloaded.domain
    assert Scene.of(downloaded) == Scene.of(game)
    assert State(Scene.of(downloaded)).step("help").startswith("Available commands:\n  look: ")
    with pytest.raises(EnvError, match="grammar"):
        Scene.of(replace(downloaded, grammar=downloaded.grammar.replace("use an object", "use it")))


def facts(state):
    """Returns all that distinguishes two states of one game, as a set."""
    found = {("location", state.location), ("held", state.held)}
    found |= {("open", place) for place in state.opened} | {("taken", *pair) for pair in state.taken}
    for name in ("contents", "seen_from", "marks"):
        found |= {(name, key, each) for key, values in getattr(state, name).items() for each in values}
    return frozenset(found)


@pytest.mark.parametrize("index", range(4))
def test_keys_are_equal_for_equal_states_only(index):
    """Random play from copies of the start and of earlier states meets many states on several ways."""
    rng = random.Random(index)
    states = [State(Scene.of(small_game(index, filters=ALL_TYPES_KITCHEN if index % 2 else SMALL)))]
    for _ in range(1500):
        state = rng.choice(states[:3] + states[-60:]).copy()
        here = [action for action in state.admissible if not action.startswith(("go to", "help", "look", "inventory"))]
        state.step(rng.choice(here if here and rng.random() < 0.7 else state.admissible))
        states.append(state)
    by_key = {}
    for state in states:
        by_key.setdefault(state.key(), []).append(state)
    assert len(by_key) == len({facts(state) for state in states})
    assert all(len({facts(state) for state in same}) == 1 for same in by_key.values())
    ways = [same for same in by_key.values() if len(same) > 1]
    assert len(ways) > 20
    for first, *_, last in ways:
        assert first.admissible == last.admissible
        assert [first.copy().step(action) for action in first.admissible] == [
            last.copy().step(action) for action in last.admissible
        ]
