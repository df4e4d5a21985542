"""ScienceWorld keeps the contract, counts success strictly, never loses a turn, and names what is wrong."""

import pickle
import random
from functools import partial

import pytest

from epo_trl.envs import EnvError
from epo_trl.envs.checker import check_text_env
from epo_trl.envs.scienceworld import EngineRules, ScienceWorldSuite
from epo_trl.envs.scienceworld.env import ScienceWorldEnv
from epo_trl.envs.testing import EnvContract
from epo_trl.errors import EpoTrlError

pytestmark = pytest.mark.games

TOUR = ("look around", "inventory", "open door to kitchen", "teleport to kitchen", "look around")
TOUR += tuple(f"teleport to {place}" for place in ("workshop", "outside", "bathroom", "greenhouse"))
WAITING = TOUR + ("wait",) * 13


def looks_around(info, rng):
    thing = rng.choice(info["objects"])
    return rng.choice(["look around", "inventory", "wait1", f"look at {thing}", f"open {thing}", f"go to {thing}"])


class TestScienceWorld(EnvContract):
    expert_turns = None
    player = staticmethod(looks_around)

    def make_suite(self):
        return ScienceWorldSuite(n_iid=10, n_ood=10, heldout_types=[])


def start(env, task_id="train/boil/3", **options):
    return env.reset(seed=0, options={"task_id": task_id, **options})


@pytest.fixture(scope="module")
def suite():
    """Its JVM runs on from test to test: a new one takes seconds to become fast."""
    suite = ScienceWorldSuite()
    keeper = suite.make_env()
    start(keeper)
    yield suite
    keeper.close()


@pytest.fixture
def env(suite):
    env = suite.make_env()
    yield env
    env.close()


@pytest.fixture
def env_with(suite):
    """Returns a function that makes an environment with other rules on the JVM of `suite`."""
    made = []

    def make(**rules):
        made.append(ScienceWorldEnv(suite._hosts[0], EngineRules(**rules)))
        return made[-1]

    yield make
    for env in made:
        env.close()


def test_an_environment_that_lists_actions_keeps_the_contract(suite, env_with):
    make_env = partial(env_with, list_actions=True)
    check_text_env(make_env(), [suite.task_ids("iid")[1]], make_env=make_env, turns=6)


def play(env, actions):
    """Returns the last result of `step`, and all rewards."""
    rewards = []
    for action in actions:
        result = env.step(action)
        rewards.append(result[1])
        if result[2] or result[3]:
            break
    return result, rewards


def test_info_holds_what_prompts_show(env):
    observation, info = start(env)
    assert observation == info["look"] and observation.startswith("This outside location is called the outside.")
    assert info["task"].startswith("Your task is to boil water. ")
    assert (info["task_type"], info["task_id"], info["score"], info["moves"]) == ("boil", "train/boil/3", 0, 0)
    assert {"axe", "fountain", "door to kitchen"} <= set(info["objects"])
    assert "orange" in info["inventory"]
    assert {"pick up OBJ", "wait1", "teleport OBJ"} <= set(info["action_templates"])
    assert "connect OBJ to OBJ" not in info["action_templates"]
    assert info["accepted"] and not info["failed"] and info["admissible_actions"] is None


def test_an_unknown_action_costs_no_tick_and_is_not_accepted(env):
    start(env)
    for action in ("fly to the moon", "", "pick up", "go to hallway kitchen"):
        *_, info = env.step(action)
        assert (info["accepted"], info["moves"]) == (False, 0)


@pytest.mark.parametrize(("options", "every"), [({}, 12), ({"engine_limit": 1000}, 24)])
def test_the_wait_script_wins_nothing(suite, env, options, every):
    for task_type in sorted({task_id.split("/")[1] for task_id in suite.task_ids("train")})[::every]:
        start(env, f"train/{task_type}/0", **options)
        (*_, terminated, truncated, info), _ = play(env, WAITING)
        assert (terminated, truncated, info["won"]) == (False, False, False)
        assert info["moves"] > 100


def test_under_the_released_limit_the_wait_script_is_done_with_a_score(env):
    start(env, "train/find-plant/0", engine_limit=100)
    turns = []
    for action in WAITING:
        *_, terminated, truncated, info = env.step(action)
        turns.append((terminated, truncated, info["moves"] > 100))
        if truncated:
            break
    assert turns == [(False, False, False)] * (len(turns) - 1) + [(False, True, True)]
    assert info["score"] > 0 and not info["won"]


def test_a_failure_ends_the_episode_and_is_paid_once(env_with):
    for reward in (0.0, -0.5):
        strict = env_with(failure_reward=reward)
        start(strict)
        (_, _, terminated, truncated, info), rewards = play(strict, ["teleport to kitchen", "focus on stove"])
        assert (terminated, truncated, info["won"], info["failed"], info["score"]) == (True, False, False, True, -100)
        assert rewards == [0.0, reward] and strict.step("look around")[1] == 0.0


def test_solving_a_task_pays_the_increase_of_the_score(env):
    start(env, "train/lifespan-longest-lived/0")
    actions = ["teleport to outside", "look around", "focus on baby baby brown bear"]
    (_, _, terminated, truncated, info), rewards = play(env, actions)
    assert (terminated, truncated, info["won"], info["score"]) == (True, False, True, 100)
    assert sum(rewards) == pytest.approx(1.0) and rewards[0] > 0


# --- Ambiguous requests --------------------------------------------------------------------------------------------


def ask(env):
    """Returns the choices after an input that means two things: an orange in the bowl, one in the inventory."""
    start(env)
    env.step("teleport to kitchen")
    observation, *_, info = env.step("pick up orange")
    return observation, info


def test_the_agent_may_answer_an_ambiguous_request(env):
    observation, info = ask(env)
    assert observation.startswith("Ambiguous request") and info["accepted"]
    number = next(line.split(":")[0] for line in observation.splitlines() if "in bowl" in line)
    observation, *_, after = env.step(number)
    assert "orange" in observation and after["moves"] == info["moves"] + 1 and after["accepted"]
    assert after["inventory"].count("orange") == 2


@pytest.mark.parametrize("action", ["look at table", "open cupboard", "inventory", "pick up lighter"])
def test_another_action_is_not_swallowed_by_an_ambiguous_request(env, action):
    start(env)
    env.step("teleport to kitchen")
    expected, *_, before = env.step(action)
    _, info = ask(env)
    observation, *_, after = env.step(action)
    assert (observation, after["accepted"]) == (expected, True)
    assert after["moves"] - info["moves"] == before["moves"] - 1


def test_the_environment_may_answer_an_ambiguous_request(env_with):
    env = env_with(ambiguity="first")
    for _ in range(3):
        observation, info = ask(env)
        assert observation == "You move the orange to the inventory." and info["inventory"].count("orange") == 2
        assert info["moves"] == 2


# --- Worlds that share a JVM ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_chance_depends_on_the_seed_and_not_on_the_neighbours(suite):
    envs = [suite.make_env() for _ in range(3)]

    def texts(env, seed, *others):
        env.reset(seed=seed, options={"task_id": "train/mendelian-genetics-known-plant/5"})
        seen = [env.step("teleport to greenhouse")]
        for turn in range(4):
            for other in others:
                other.step(("wait1", "look around")[turn % 2])
            seen += [env.step("wait"), env.step("look around")]
        return seen

    start(envs[1], "train/grow-fruit/1")
    start(envs[2], "train/power-component/1")
    alone = texts(envs[0], 1)
    assert texts(envs[0], 1, *envs[1:]) == alone
    assert texts(envs[0], 2) != alone
    for env in envs:
        env.close()


def test_a_world_keeps_its_own_simplifications_beside_others(env_with):
    env, other = (env_with(list_actions=True) for _ in range(2))
    _, alone = start(env, "train/power-component/0")
    start(other, "train/boil/0")  # "easy" takes the electrical actions away from it, in the whole JVM
    *_, beside = env.step("look around")
    assert beside["admissible_actions"] == alone["admissible_actions"]
    assert any(action.startswith("connect ") for action in alone["admissible_actions"])
    assert not any(action.startswith("connect ") for action in other.step("look around")[4]["admissible_actions"])


def test_a_neighbour_that_loads_later_takes_nothing_away(env, env_with):
    start(env, "train/boil/1")
    alone = env.step("teleport to outside")
    assert alone[4]["score"] == 3  # 2 with the neighbour's ids: one thing has vanished
    start(env, "train/boil/1")
    start(env_with(), "train/grow-plant/2")
    assert env.step("teleport to outside") == alone


# --- Copies: the episode played again in another world ---------------------------------------------------------------

# Random events: seeds that are planted, and a mixture.
TASKS = ("train/grow-plant/2", "train/chemistry-mix/1")


def acts(info, rng):
    """Returns a random action, now and then a number, which answers a question of the parser."""
    things = info["objects"]
    words = ("open {}", "pick up {}", "look at {}", "activate {}", "go to {}", "wait1", "move {} to {}", "0")
    return rng.choice(words).format(rng.choice(things), rng.choice(things))


@pytest.mark.parametrize("task", TASKS)
def test_a_copy_plays_on_alone_and_the_original_does_not_notice(suite, task):
    """A copy of a copy too; the others play something else in between."""
    rng, env = random.Random(0), suite.make_env()
    info = env.reset(seed=5, options={"task_id": task, "state_key": True})[1]
    for _ in range(3):
        first, second = env.copy(), env.copy().copy()
        for twin in (first, first.copy()):
            twin.step(acts(info, rng))
        action = acts(info, rng)
        result = env.step(action)
        assert second.step(action) == result
        info = result[4]
        for twin in (first, second):
            twin.close()
    env.close()


# --- Wrong input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task_id": "train/boil/14"}, "variation of train/boil from 0 to 13, got 'train/boil/14'"),
        ({"task_id": "test/cook/0"}, "train, iid, ood, heldout.*boil, change.*'test/cook/0'"),
        ({"task_id": "train/boil/0", "simplification": "openDoors"}, "'easy'.*'openDoors'; change the protocol"),
    ],
)
def test_reset_says_what_it_takes(env, options, message):
    with pytest.raises(EnvError, match=message):
        env.reset(options=options)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"heldout_types": ["boil"], "task_types": ["boil"]}, "heldout_types: .*task_types, got 'boil'"),
        ({"teleport_rate": 0.5, "simplification": "openDoors"}, "teleport_rate: expected 0 .*'openDoors', got 0.5"),
        ({"java": "/no/java"}, "java: .*got '/no/java'.*epo-trl\\[scienceworld\\]"),
    ],
)
def test_a_bad_setting_is_named_when_the_suite_is_made(bad, message):
    with pytest.raises(EpoTrlError, match=message):
        ScienceWorldSuite(**bad)


def test_a_suite_can_be_pickled_while_it_is_played(suite, env):
    start(env)
    copied = pickle.loads(pickle.dumps(suite))
    assert copied.task_ids("iid") == suite.task_ids("iid")
    other = copied.make_env()
    assert start(other) == start(env)
    other.close()


def test_a_state_key_stands_for_room_inventory_and_score(env):
    """Walking away changes the key, and coming back restores it; waiting changes only what the key leaves out."""
    assert "state_key" not in start(env)[1]
    first = start(env, state_key=True)[1]["state_key"]
    keys = [first]
    # The first tick fills the fountain outside and scores; the second changes nothing that is in the key.
    tour = ("teleport to kitchen", "teleport to workshop", "teleport to kitchen", "pick up thermometer")
    for action in ("wait1", "wait1", *tour):
        keys.append(env.step(action)[4]["state_key"])
    _, ticked, waited, kitchen, workshop, again, holding = keys
    assert ticked == waited and kitchen == again
    assert len({first, ticked, kitchen, workshop, holding}) == 5
    assert start(env, state_key=True)[1]["state_key"] == first
