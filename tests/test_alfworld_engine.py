import random
from dataclasses import replace

import pytest
from alfworld_games import (
    ALL_TYPES_KITCHEN,
    SMALL,
    as_downloaded,
    edit,
    game_like_the_real_ones,
    pairs,
    small_game,
    starting_at_a_receptacle,
)

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


def test_goals_are_read_whatever_their_variables_are_called():
    text = """(:goal (and (exists (?x # receptacle) (exists (?y # object)
        (and (heatable ?y) (objectType ?y EggType) (isHot ?y) (inReceptacle ?y ?x) (receptacleType ?x SafeType))))))"""
    assert read_goal(text, "here") == Goal("pick_heat_then_place_in_recep", "egg", "safe", state="hot")


@pytest.mark.parametrize(
    "goal",
    [
        "(:goal (and (forall (?r - receptacle) (not (opened ?r)))))",
        "(:goal (and (exists (?o - object) (and (objectType ?o EggType) (isHot ?o)))))",
        "(:goal (and (exists (?o - object ?r - receptacle) (and (objectType ?o EggType) (receptacleType ?r BedType)"
        " (inReceptacle ?o ?r) (isSliced ?o)))))",
        "(:goal (and (exists (?o - object ?r - receptacle) (and (objectType ?o EggType) (inReceptacle ?o ?r)))))",
        "(:goal (and (isHot egg_1)))",
        "(:goal (and ",
    ],
)
def test_an_unknown_goal_is_refused_with_its_text_and_file(goal):
    with pytest.raises(EnvError, match=r"a/game\.tw-pddl.*\(:goal.*engine='textworld'"):
        read_goal(goal, "a/game.tw-pddl")


@pytest.mark.parametrize("fact", ["(isBroken mug_bar_1)", "(openable a b)", "(holds agent1 mug_bar_1)"])
def test_an_unknown_fact_is_refused_by_name(fact):
    game = edit(small_game(), "", fact)
    with pytest.raises(EnvError, match=f"edited.*{fact[1:-1].lower()}"):
        Scene.of(game)


def test_other_rules_or_texts_are_refused():
    game = small_game()
    with pytest.raises(EnvError, match="pddl_domain"):
        Scene.of(replace(game, domain=game.domain.replace("(isHot ?o)", "(isCool ?o)")))
    for known, other in (("You open the", "You pry open the"), ("move {o} to {r}", "put {o} in/on {r}")):  # before 0.4
        with pytest.raises(EnvError, match="grammar.*alfworld-download --force"):
            Scene.of(replace(game, grammar=game.grammar.replace(known, other)))
    with pytest.raises(EnvError, match="Your task is to"):
        Scene.of(replace(game, grammar=game.grammar.replace("Your task is to", "Do")))


def test_comments_and_layout_of_the_rules_do_not_matter():
    game = small_game()
    assert Scene.of(replace(game, domain=game.domain.replace("\n", "  ; a comment\n\n"))).task


def test_what_lies_in_a_movable_container_is_listed_when_it_is_held():
    game = game_like_the_real_ones()
    state = State(Scene.of(game))
    names = display_names(argument.lower() for row in pairs(game, "inReceptacle") for argument in row)
    holder = names[pairs(game, "inReceptacleObject")[0][1].lower()]
    place = names[dict(pairs(game, "inReceptacle"))[pairs(game, "inReceptacleObject")[0][1]].lower()]
    for action in (f"go to {place}", f"open {place}", f"take {holder} from {place}"):
        state.step(action)
    text = state.step(f"examine {holder}")
    assert text.startswith(f"This is a normal {holder}. In it, you see a ") and " and a " in text


def test_a_game_may_start_at_a_receptacle():
    state = State(Scene.of(starting_at_a_receptacle(small_game())))
    assert state.describe().startswith("You are facing the ")


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


def test_a_room_with_a_sink_is_refused():
    with pytest.raises(EnvError, match="'sink'"):
        Scene.of(edit(as_downloaded(small_game()), "", "(receptacleType Sink_bar_1 SinkType)"))


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
