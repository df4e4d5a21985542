"""The ALFWorld expert wins, from observations, admissible actions and the task type."""

import itertools
import random
import re
from collections import Counter, defaultdict

import pytest
from alfworld_games import edit, pairs, play

from epo_trl.envs.alfworld import AlfworldExpert, GeneratedAlfworld
from epo_trl.envs.alfworld.engine import State
from epo_trl.envs.alfworld.env import AlfworldEnv, Opened
from epo_trl.envs.alfworld.expert import parse_kind
from epo_trl.envs.alfworld.generator import generate
from epo_trl.envs.alfworld.notes import listed_things
from epo_trl.envs.alfworld.pddl import TASK_TYPES
from epo_trl.envs.alfworld.scene import Scene
from epo_trl.envs.alfworld.task_specs import Filters
from epo_trl.envs.base import stratified_sample
from epo_trl.models import build_tokenizer


@pytest.mark.slow
def test_it_wins_nearly_all_games_of_every_type_within_50_turns_and_all_within_150():
    suite = GeneratedAlfworld(n_train=180, n_iid=60, n_ood=60, seed=5)
    env, turns, lost = suite.make_env(), defaultdict(list), []
    for split in suite.splits:
        for task_id in suite.task_ids(split):
            log, won = play(env, task_id, suite.make_expert())
            turns[log[0][1]["task_type"]].append(len(log) if won else None)
            lost += [] if won else [task_id]
    assert set(turns) == set(TASK_TYPES)
    assert all(sum(map(bool, counts)) >= 0.85 * len(counts) for counts in turns.values())
    assert len(lost) <= 0.08 * 300
    assert all(play(env, task_id, suite.make_expert(), turns=150)[1] for task_id in lost)


def searched(log):
    """Returns the receptacles that an expert tried, in order, until it found the first object."""
    tried = [re.fullmatch(r"find \w+ , (?:try|open) (.+)", thought) for _, _, thought, _ in log]
    return list(dict.fromkeys(match[1] for match in itertools.takewhile(bool, tried)))


def test_with_odds_it_searches_the_likeliest_receptacles_first_and_equal_ones_as_listed():
    suite = GeneratedAlfworld(n_train=30)
    env, lengths = suite.make_env(), set()
    kinds = sorted({parse_kind(name) for id_ in suite.task_ids("train") for name in suite._scene(id_).receptacles})
    for number, task_id in enumerate(suite.task_ids("train")):
        rng = random.Random(number)
        odds = {kind: rng.choice([0.0, 0.5, 1.0]) for kind in kinds}
        _, info = env.reset(options={"task_id": task_id})
        ordered = sorted(info["unvisited"], key=lambda name: -odds[parse_kind(name)])
        wanted = info["task"].split()
        expert = AlfworldExpert(0, {(word, kind): odd for word in wanted for kind, odd in odds.items()})
        found = searched(play(env, task_id, expert)[0])
        assert found == ordered[: len(found)]
        lengths.add(len(found))
    assert max(lengths) > 5


def test_the_odds_are_those_that_one_sees_in_the_training_games():
    """Of five games two are counted; here each of their receptacles is looked into."""
    suite = GeneratedAlfworld(n_train=5, expert_search="likely", room_types=["bathrooms"])
    env, places, things = suite.make_env(), Counter(), Counter()
    for task_id in stratified_sample(suite.task_ids("train"), 2):
        _, info = env.reset(options={"task_id": task_id})
        for place in info["unvisited"]:
            seen = ""
            for action in (f"go to {place}", f"open {place}", f"examine {place}"):
                seen = env.step(action)[0]
            places[parse_kind(place)] += 1
            things.update((parse_kind(thing), parse_kind(place)) for thing in listed_things(seen))
    expected = {pair: count / places[pair[1]] for pair, count in things.items()}
    assert len(expected) > 5 and suite.make_expert()._odds == pytest.approx(expected)


def test_the_tiny_tokenizer_can_say_every_action():
    suite = GeneratedAlfworld(n_train=12)
    env = suite.make_env()
    logs = [play(env, task_id, suite.make_expert())[0] for task_id in suite.task_ids("train")]
    said = {action for log in logs for _, info, _, done in log for action in (done, *info["admissible_actions"])}
    tokenizer = build_tokenizer(said)
    assert {info["task_type"] for log in logs for _, info, _, _ in log} == set(TASK_TYPES)
    assert {action for action in said if tokenizer.decode(tokenizer(action)["input_ids"]) != action} == set()


@pytest.mark.parametrize("verb", ["clean", "heat", "cool"])
def test_a_mistake_in_place_of_the_treatment_is_followed_by_the_treatment(verb):
    suite = GeneratedAlfworld(n_train=1, task_types=[f"pick_{verb}_then_place_in_recep"])
    env, expert, treated = suite.make_env(), suite.make_expert(), []
    observation, info = env.reset(options={"task_id": "train/0"})
    expert.reset(observation, info)
    for _ in range(50):
        action = expert.act(observation, info)[1]
        is_first = action.startswith(f"{verb} ") and not treated
        treated += [action] if action.startswith(f"{verb} ") else []
        observation, _, won, _, info = env.step("open the window" if is_first else action)
        if won:
            break
    assert won and len(treated) == 2 and treated[0] == treated[1]


def test_things_that_it_cannot_see_do_not_change_its_moves():
    game = generate("train", 0, 0, Filters(room_types=("kitchens",), task_types=("pick_and_place_simple",))).game
    closed = [row[0] for row in pairs(game, "openable")]
    hidden = [f"(inReceptacle {thing} {place})" for thing, place in pairs(game, "inReceptacle") if place in closed]
    emptied = edit(game, "|".join(map(re.escape, hidden)))
    seen = []
    for variant in (game, emptied):
        scene = Scene.of(variant)
        env = AlfworldEnv(lambda _, scene=scene: Opened(State(scene), scene.task, scene.goal.task_type))
        log, _ = play(env, "any", AlfworldExpert(1), turns=150)
        seen.append([(observation, action) for observation, _, _, action in log])
    assert hidden and seen[0][0] == seen[1][0]
    for first, second in zip(*seen, strict=False):
        if first[0] != second[0]:
            assert "is open" in first[0]
            break
        assert first[1] == second[1]
